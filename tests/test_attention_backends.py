"""Attention backends against the reference: outputs, gradients and row statistics."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    ALIBI_SLOPES,
    KERNEL_OPERATIONS,
    LENGTH,
    MASKS,
    assert_close,
    combine_masks,
    compare_backend,
    draw_inputs,
    interpret_pallas,
    make_alibi_bias,
    make_attention_spec,
)
from tiny_specs import COVERING_OPERATIONS, OPERATIONS, make_attention_config, make_case_params

from sinklab.attn import chunked, reference
from sinklab.attn import mask as masks
from sinklab.attn.backends import BACKENDS
from sinklab.attn.key_attention_sums import compute_key_attention_sums
from sinklab.attn.spec import ScoreBias
from sinklab.model.positions import ForgetGate

pytestmark = pytest.mark.usefixtures('small_blocks')


def compare_under_all_masks(backend, operation, width, dtype, atol):
    """Compare a backend with the reference in one batch of all masks, with a learned key and ALiBi."""
    arrays, slopes = draw_inputs(width, columns=1, dtype=dtype, batch=len(MASKS)), (jnp.asarray(ALIBI_SLOPES),)
    bias = functools.partial(make_alibi_bias, columns=1)
    compare_backend(backend, make_attention_config(*operation), combine_masks(LENGTH), arrays, bias, 1, slopes, atol)


@pytest.mark.slow
@pytest.mark.parametrize('operation', make_case_params(OPERATIONS, COVERING_OPERATIONS[::2]), ids='-'.join)
def test_chunked_attention_matches_reference_with_masks_columns_and_alibi(operation):
    compare_under_all_masks('chunked', operation, 16, jnp.float32, 5e-5)


def test_chunked_attention_matches_reference_with_positions_of_each_head():
    distance_BTH = np.random.default_rng(2).uniform(0, 0.1, (1, LENGTH, 2)).cumsum(1).astype(np.float32)

    def make_bias(query_BTH):
        key_BSH = jnp.pad(query_BTH, ((0, 0), (1, 0), (0, 0)))
        return ScoreBias(ForgetGate.relative_bias, query_BTH, key_BSH, jnp.zeros((1, 1)))

    attention, mask = make_attention_config('exp', 'sum'), MASKS['window'](LENGTH)
    compare_backend(
        'chunked', attention, mask, draw_inputs(16, columns=1), make_bias, 1, (jnp.asarray(distance_BTH),)
    )


@pytest.mark.slow
@pytest.mark.parametrize('operation', make_case_params(KERNEL_OPERATIONS, COVERING_OPERATIONS[::2]), ids='-'.join)
def test_tpu_kernels_match_reference_with_masks_columns_and_alibi(operation):
    width = (64, 96, 128)[OPERATIONS.index(operation) % 3]
    compare_under_all_masks('tpu', operation, width, jnp.float32, 5e-5)
    compare_under_all_masks('tpu', operation, width, jnp.bfloat16, 1.5e-2)


@pytest.mark.slow
def test_chunks_beyond_512_queries_are_computed_in_loops_of_at_least_two():
    for length in range(1, 2400):
        chunk_size = chunked.choose_chunk_size(length)
        num_chunks = -(-length // chunk_size)
        groups = chunked.group_chunks(num_chunks)
        assert [chunk for group in groups for chunk in range(*group)] == [*range(num_chunks)]
        assert length <= 512 or all(last - first >= 2 for first, last in groups)


@pytest.mark.parametrize(('mask', 'backend'), [*zip(MASKS, itertools.cycle(('chunked', 'tpu')))])
def test_static_mask_matches_reference(mask, backend):
    operation = ('exp', 'plus_one') if mask in ('full', 'window', 'documents') else ('sigmoid', 'none')
    compare_backend(backend, make_attention_config(*operation), MASKS[mask](LENGTH), draw_inputs())


@pytest.mark.slow
@pytest.mark.parametrize(('backend', 'operation'), [('chunked', ('exp', 'plus_one')), ('tpu', ('elu1', 'sum'))])
def test_grouped_queries_and_wider_values_match_reference(backend, operation):
    arrays = draw_inputs(64, heads=4, groups=2, value_width=96)
    compare_backend(backend, make_attention_config(*operation), masks.make_causal_mask(LENGTH), arrays)


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize('length', [1, 100, 257])
def test_length_not_divisible_by_block_matches_reference(backend, length):
    operation, arrays = make_attention_config('exp', 'sum'), draw_inputs(64, length=length)
    compare_backend(backend, operation, masks.make_causal_mask(length), arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('backend', 'operation'),
    [
        ('chunked', ('exp', 'sum')),
        ('chunked', ('elu1', 'sum')),
        ('tpu', ('exp', 'p_norm')),
        ('tpu', ('exp', 'plus_one')),
    ],
)
def test_fully_masked_queries_give_zeros_and_finite_gradients(backend, operation):
    end_T = np.where(np.arange(LENGTH) % 3 == 1, 0, np.arange(LENGTH) + 1)
    end_T[128:] = 0
    mask, arrays = masks.make_static_mask(np.zeros(LENGTH, np.int32), end_T.astype(np.int32)), draw_inputs(64)
    output, gradients = compare_backend(backend, make_attention_config(*operation), mask, arrays)
    assert (np.asarray(output)[:, end_T == 0] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.slow
@pytest.mark.parametrize('scale', [0.3, -0.2])
def test_backends_use_scale_of_operation(scale):
    arrays = draw_inputs(16, columns=1)
    for pair in (('exp', 'p_norm'), ('sigmoid', 'none')):
        spec = make_attention_spec(make_attention_config(*pair), masks.make_causal_mask(LENGTH), 1)
        operation = dataclasses.replace(spec.operation, scale=scale)
        spec = dataclasses.replace(spec, operation=operation, needs_abs_weight_sum=True)
        query, key, value = arrays
        plain_spec = make_attention_spec(make_attention_config(*pair), masks.make_causal_mask(LENGTH), 1)
        # the reference with a scaled query
        expected = reference.attend(scale * np.sqrt(16) * query, key, value, plain_spec)
        with interpret_pallas():
            for backend in ('dense', 'chunked', 'tpu'):
                result = BACKENDS[backend].attend(*arrays, spec)
                assert_close(
                    (result.output_BTHK, result.row_stats.abs_weight_sum_BHT),
                    (expected.output_BTHK, expected.row_stats.abs_weight_sum_BHT),
                    5e-5,
                )
                key_attention_sums = compute_key_attention_sums(query, key, result.row_stats, spec, 3)
                assert_close(key_attention_sums.raw_BHS, expected.attention_BHTS[..., :4].sum(2), 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('backend', 'operation'),
    [
        ('dense', ('exp', 'sum')),
        ('chunked', ('sigmoid', 'none')),
        ('tpu', ('exp', 'p_norm')),
        ('tpu', ('identity', 'clamped')),
    ],
)
def test_key_mass_matches_full_attention_matrix(backend, operation):
    arrays, keys = draw_inputs(64, columns=1, batch=len(MASKS)), 5
    spec = make_attention_spec(
        dataclasses.replace(make_attention_config(*operation), gain=0.5),
        combine_masks(LENGTH),
        1,
        make_alibi_bias(columns=1),
    )
    spec = dataclasses.replace(spec, needs_abs_weight_sum=True)
    with interpret_pallas():
        _, row_stats, _ = BACKENDS[backend].attend(*arrays, spec)
    key_attention_sums = compute_key_attention_sums(*arrays[:2], row_stats, spec, keys, first_query=2)
    attention_BHTS = np.float64(reference.attend(*arrays, spec).attention_BHTS)[:, :, 2:]
    mass = np.abs(attention_BHTS).sum(-1, keepdims=True)
    assert_close(key_attention_sums.raw_BHS, attention_BHTS[..., : 1 + keys].sum(2), 2e-5)
    assert_close(key_attention_sums.share_BHS, (np.abs(attention_BHTS) / (mass + 1e-8))[..., : 1 + keys].sum(2), 2e-5)
    assert_close(key_attention_sums.abs_weight_sum_BH, mass[..., 0].mean(-1), 2e-5)
