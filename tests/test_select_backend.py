"""Tests of the selection, verification and rejection of attention backends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KERNEL_OPERATIONS, MASKS, interpret_pallas, make_alibi_bias, make_attention_spec
from conftest import make_attention_config, make_tiny_spec

from sinklab.attn import (
    backends,
    cudnn,
    kernel_attention,
    reference,
)
from sinklab.attn import mask as masks
from sinklab.attn.backends import BackendChoice, explain_unsupported, select_backend
from sinklab.attn.spec import AttentionProblem, RelativePositionBias, ScoreBias
from sinklab.config.spec import Hardware
from sinklab.errors import UserError
from sinklab.model.attention import make_attention_problem as case_of
from sinklab.parallel import device_mesh, sharding

pytestmark = pytest.mark.usefixtures('small_blocks')
PLAIN = AttentionProblem(
    make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(256)), 2, 64, 64, 'bfloat16'
)


def of(*pair, length=256, power=2.0, **how):
    return dict(
        spec=make_attention_spec(make_attention_config(*pair, power=power), masks.make_causal_mask(length), **how)
    )


TABLE = ScoreBias(RelativePositionBias(lambda table, distance: distance, np.zeros((1, 1)), is_elementwise=False))


@pytest.mark.parametrize(
    ('wanted', 'platform', 'case', 'message'),
    [
        ('tpu', 'cpu', {}, 'it needs tpu, and these devices are cpu'),
        ('cudnn', 'gpu', of('sigmoid', 'none'), 'it supports only softmax'),
        (
            'cudnn',
            'gpu',
            dict(spec=make_attention_spec(make_attention_config('exp', 'sum'), masks.make_prefix_mask(256, 3))),
            'neither causal',
        ),
        ('cudnn', 'gpu', dict(value_width=128), 'equal widths'),
        ('cudnn', 'gpu', dict(dtype='float32'), 'needs bfloat16'),
        ('tpu', 'tpu', of('softpick', 'sum'), 'softpick'),
        ('tpu', 'tpu', of('exp', 'sum', bias=TABLE), 'a learned table'),
        ('tpu', 'tpu', of('sigmoid', 'p_norm', power=5.0), 'may underflow'),
        ('tpu', 'tpu', dict(width=512, value_width=512), 'heads wider than 256'),
        ('tpu', 'tpu', of('exp', 'sum', length=2**20), 'does not fit in VMEM'),
    ],
)
def test_select_backend_rejects_unsupported_case_and_lists_alternatives(wanted, platform, case, message):
    with pytest.raises(UserError, match=message) as refused:
        select_backend(wanted, platform, dataclasses.replace(PLAIN, **case))
    assert 'auto, dense, chunked' in str(refused.value)


def test_find_causal_window_returns_window_of_causal_masks_only():
    assert cudnn.find_causal_window(masks.make_causal_mask(8)) == 7
    assert cudnn.find_causal_window(masks.make_causal_mask(8) & masks.make_window_mask(8, 3)) == 2
    assert cudnn.find_causal_window(masks.make_prefix_mask(8, 3)) is None
    assert (
        cudnn.find_causal_window(masks.make_causal_mask(8) & masks.make_document_mask(jnp.zeros((1, 8), int))) is None
    )


@pytest.mark.slow
def test_cudnn_attend_applies_scale_of_operation(monkeypatch):
    own, asked = (
        jax.nn.dot_product_attention,
        make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16)),
    )
    monkeypatch.setattr(
        jax.nn, 'dot_product_attention', lambda *arrays, **how: own(*arrays, **how | dict(implementation='xla'))
    )
    query, key, value = (jax.random.normal(jax.random.key(seed), (1, 16, 2, 8)) for seed in range(3))
    for scale in (None, 0.7):
        scaled = dataclasses.replace(asked, operation=dataclasses.replace(asked.operation, scale=scale))
        found, expected = (attend(query, key, value, scaled) for attend in (cudnn.attend, reference.attend))
        np.testing.assert_allclose(found.output_BTHK, expected.output_BTHK, rtol=1e-4, atol=1e-5)


def test_cudnn_row_stats_are_float32_although_jax_rounds_them(monkeypatch):
    asked = make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16))
    array = jnp.ones((1, 16, 2, 8), jnp.bfloat16)
    monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *arrays, **how: (array, array[..., 0]))
    row_stats = cudnn.attend(array, array, array, asked).row_stats
    assert {leaf.dtype for leaf in jax.tree.leaves(row_stats)} == {jnp.dtype('float32')}


@pytest.mark.slow
@pytest.mark.parametrize('layout', [Hardware(data=2, tensor=2), Hardware(tensor=2), Hardware()], ids=str)
def test_cudnn_attend_receives_local_sequences_and_heads(monkeypatch, layout):
    asked, own = (
        make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16)),
        jax.nn.dot_product_attention,
    )
    query, key, value = (jax.random.normal(jax.random.key(seed), (4, 16, 4, 8)) for seed in range(3))
    key, value = key[:, :, ::2], value[:, :, ::2]
    shapes = []

    def by_xla(*arrays, implementation, local_window_size, **how):
        shapes.append([array.shape for array in arrays])
        return own(*arrays, implementation='xla', local_window_size=local_window_size, **how)

    expected, residual = own(query, key, value, is_causal=True, implementation='xla', return_residual=True)
    monkeypatch.setattr(jax.nn, 'dot_product_attention', by_xla)
    mesh = device_mesh.make_mesh(layout)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda *arrays: cudnn.attend(*arrays, asked))(query, key, value)
    rows, heads = 4 // sharding.count_shards(mesh), 2 // mesh.shape['tensor']
    assert shapes == [[(rows, 16, 2 * heads, 8), (rows, 16, heads, 8), (rows, 16, heads, 8)]]
    np.testing.assert_allclose(found.output_BTHK, expected, atol=1e-6)
    np.testing.assert_allclose(found.row_stats.shift_BHT, residual.swapaxes(1, 2), atol=1e-6)


@pytest.mark.slow
def test_select_backend_skips_kernel_with_wrong_output(monkeypatch):
    asked = make_attention_spec(
        make_attention_config('exp', 'p_norm'), MASKS['window'](256), 1, make_alibi_bias(columns=1)
    )
    case = dataclasses.replace(PLAIN, spec=asked)
    with interpret_pallas():
        assert select_backend('auto', 'tpu', case) == BackendChoice('tpu')
        monkeypatch.setattr(kernel_attention, 'attend', doubled(kernel_attention.attend))
        choice = select_backend('auto', 'tpu', case)
    assert choice.backend == 'chunked'
    assert 'wrong' in str(choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        dict(model__mask__window=5, model__position='alibi'),
        dict(model__mask__prefix=3, model__columns__kind='kv'),
        dict(model__mask__document=True, model__columns__kind='sink_token', model__position='relative_paper_code'),
    ],
)
def test_truncate_problem_keeps_mask_and_bias_of_run(changes):
    """Compare the first queries, keys and heads with those of the whole problem."""
    spec = make_tiny_spec(**changes, model__attention__similarity='sigmoid', model__attention__normalizer='none')
    whole, length = case_of(spec.model, 16), 12
    shown = backends.truncate_problem(whole, length)
    keys, columns = shown.spec.mask.max_end, whole.spec.num_learned_kv
    seen = np.asarray(whole.spec.materialize_mask(16))[:, :, :length]
    np.testing.assert_array_equal(shown.spec.materialize_mask(keys), seen[..., : columns + keys])
    assert not seen[..., columns + keys :].any()
    added = np.broadcast_to(whole.spec.materialize_bias(16), (1, 4, whole.num_queries, columns + 16))
    expected = added[:, : shown.heads, :length, : columns + keys]
    np.testing.assert_array_equal(np.broadcast_to(shown.spec.materialize_bias(keys), expected.shape), expected)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('operation', KERNEL_OPERATIONS, ids='-'.join)
def test_pallas_kernels_support_every_operation_except_softpick(operation, platform):
    asked = make_attention_spec(
        make_attention_config(*operation), masks.make_causal_mask(4096), 1, make_alibi_bias(columns=1)
    )
    assert explain_unsupported(platform, platform, AttentionProblem(asked, 8, 128, 128, 'bfloat16')) is None


@pytest.mark.slow
@pytest.mark.parametrize('poisoned', range(3))
def test_measure_error_is_infinite_for_nan_gradient(monkeypatch, poisoned):
    """Poison one gradient at a time."""

    @jax.custom_vjp
    def poison(*arrays):
        return arrays

    def backward(_, d_arrays):
        return tuple(d if at != poisoned else jnp.full_like(d, jnp.nan) for at, d in enumerate(d_arrays))

    poison.defvjp(lambda *arrays: (arrays, None), backward)
    attend = kernel_attention.attend
    monkeypatch.setattr(
        kernel_attention, 'attend', lambda kernels, q, k, v, *how: attend(kernels, *poison(q, k, v), *how)
    )
    with interpret_pallas():
        assert backends.measure_error('tpu', PLAIN) == float('inf')


@pytest.mark.slow
def test_select_backend_replaces_kernel_that_fails_to_lower():
    """Pallas raises ValueError when it lowers a TPU kernel without a TPU."""
    choice = select_backend('auto', 'tpu', PLAIN)
    assert (choice.backend, choice.failed_backends) == ('chunked', ('tpu',))
    assert 'ValueError' in choice.rejection_reasons['tpu']
    assert choice.rejection_reasons['tpu'] in choice.describe_fallback()


def test_select_backend_counts_unsupported_case_as_no_failure():
    choice = select_backend('auto', 'tpu', dataclasses.replace(PLAIN, **of('softpick', 'sum')))
    assert (choice.backend, choice.failed_backends, choice.describe_fallback()) == ('chunked', (), None)


@pytest.mark.parametrize(
    'failure',
    [
        NotImplementedError('no such primitive'),
        jax.errors.JaxRuntimeError('INTERNAL: Mosaic failed to compile TPU kernel'),
        RuntimeError('cuDNN is not detected.'),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_select_backend_skips_kernel_that_jax_cannot_compile(monkeypatch, failure):
    monkeypatch.setattr(kernel_attention, 'attend', raising(failure))
    choice = select_backend('auto', 'tpu', PLAIN)
    assert (choice.backend, choice.failed_backends) == ('chunked', ('tpu',))
    assert str(failure) in str(choice)


@pytest.mark.parametrize(
    'bug',
    [
        *(TypeError('unsupported operand'), ValueError('shapes do not fit'), AttributeError('no such field')),
        *(RuntimeError('dictionary changed size'), RecursionError('too deep'), AssertionError()),
    ],
    ids=lambda bug: type(bug).__name__,
)
def test_select_backend_propagates_bug_in_kernel(monkeypatch, bug):
    monkeypatch.setattr(kernel_attention, 'attend', raising(bug))
    with pytest.raises(type(bug)) as raised:
        select_backend('auto', 'tpu', PLAIN)
    assert raised.value is bug


def test_jax_error_without_cudnn_contains_expected_message():
    arrays = [jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)] * 3
    by_cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation='cudnn')
    with pytest.raises(RuntimeError, match=backends.NO_CUDNN_MESSAGE):
        jax.eval_shape(by_cudnn, *arrays)


def raising(failure):
    def fail(*given, **how):
        raise failure

    return fail


def doubled(attend):
    def twice(*given):
        found = attend(*given)
        return found._replace(output_BTHK=2 * found.output_BTHK)

    return twice


def test_verification_gives_backends_the_grouped_heads_of_the_model(monkeypatch):
    seen = []

    def attend(query_BTHK, key_BSGK, value_BSGK, spec):
        seen.append((query_BTHK.shape[2], key_BSGK.shape[2], value_BSGK.shape[2]))
        return reference.attend(query_BTHK, key_BSGK, value_BSGK, spec)

    monkeypatch.setitem(backends.BACKENDS, 'chunked', backends.XLABackend(attend))
    backends.measure_error('chunked', case_of(make_tiny_spec(model__kv_heads=2).model, 16))
    assert set(seen) == {(2, 1, 1)}
