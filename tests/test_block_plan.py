"""Tests of the plan of score blocks that TPU kernels visit and mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, draw_inputs, interpret_pallas, make_attention_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_specs import make_attention_config

from sinklab.attn import kernel_attention, reference
from sinklab.attn import mask as masks
from sinklab.attn.pallas import block_plan, tpu

intervals = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=64, max_size=64)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(intervals, st.sampled_from([(8, 8), (16, 8), (8, 32), (64, 64)]), st.booleans())
def test_block_plan_visits_visible_blocks_and_masks_partial_blocks(bounds, block, transposed):
    start, end = np.array(bounds, np.int32).T
    mask = masks.make_static_mask(start, end)
    visible_IJ = np.asarray(mask.materialize(64))[0].reshape(64 // block[0], block[0], 64 // block[1], block[1])
    for tested_mask in (mask, masks.Mask(jnp.asarray(start)[None], jnp.asarray(end)[None], mask.bounds_2T)):
        plan = block_plan.make_block_plan(tested_mask, 64, block, key_major=transposed)
        outer_N, inner_N = plan.outer_N, plan.inner_N
        assert (np.diff(outer_N) >= 0).all()
        assert set(outer_N) == set(range(64 // block[transposed]))
        query_N, key_N = (inner_N, outer_N) if transposed else (outer_N, inner_N)
        kind_IJ = np.full((64 // block[0], 64 // block[1]), block_plan.HIDDEN)
        kind_IJ[query_N, key_N] = np.asarray(plan.kind_BN)[0]
        assert (visible_IJ.all((1, 3)) == (kind_IJ == block_plan.INTERIOR)).all()
        assert not (visible_IJ.any((1, 3)) & (kind_IJ == block_plan.HIDDEN)).any()


@given(st.integers(1, 100_000))
def test_block_size_divides_padded_length(length):
    padded_length = length + -length % tpu.get_padding_multiple(length)
    assert padded_length <= max(1.125 * length, length + 127)
    for max_size in (tpu.BLOCK_SIZES[0] // 2, tpu.BLOCK_SIZES[0]):
        assert padded_length % tpu.choose_block_size(padded_length, max_size) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ('length', 'operation'),
    [(2049, ('exp', 'sum')), pytest.param(4096, ('sigmoid', 'none'), marks=pytest.mark.exhaustive)],
)
def test_kernels_with_block_sizes_of_chip_match_reference(operation, length):
    """Test 2304 queries in blocks of 256, and blocks of 1024 by 2048 in sub-blocks."""
    arrays = draw_inputs(64, heads=1, groups=1, length=length)
    start_BT = jnp.where(jnp.arange(length)[None] < 900, 0, 900)
    spec = make_attention_spec(
        make_attention_config(*operation), masks.make_causal_mask(length) & masks.make_document_mask(start_BT)
    )

    def compute_total(arrays, attend):
        output = attend(*arrays, spec).output_BTHK
        return jnp.sum(jnp.sin(output)), output

    compute_gradients = jax.jit(jax.grad(compute_total, has_aux=True), static_argnums=1)
    with interpret_pallas():
        actual = compute_gradients(arrays, functools.partial(kernel_attention.attend, tpu))
    assert_close(actual, compute_gradients(arrays, reference.attend), 5e-5)
