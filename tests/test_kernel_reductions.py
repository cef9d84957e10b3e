"""Tests of the two primitives of the kernels: cotangents of statistics, races and meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    HEADS,
    LENGTH,
    MASKS,
    assert_close,
    combine_masks,
    draw_inputs,
    interpret_pallas,
    make_alibi_bias,
    make_attention_spec,
)
from jax.sharding import AxisType
from tiny_specs import make_attention_config

from sinklab.attn import kernel_attention, reference
from sinklab.attn import mask as masks
from sinklab.attn.pallas import tpu
from sinklab.attn.pallas.kernel_interface import (
    MASK_VALUE,
    KernelSpec,
    LinearReduction,
    ScoreSpec,
    SoftmaxReduction,
    run_kernels,
)
from sinklab.model.positions import compute_alibi_slopes

pytestmark = pytest.mark.usefixtures('small_blocks')


def compute_with_matrices(reduction, arrays, mask):
    """Compute the output and the statistics of the primitives from the whole matrix."""
    score_BHTS = reference.compute_scores(*arrays[:2])
    visible_BHTS = mask.materialize(arrays[1].shape[1])[:, None]
    value_BSHV = arrays[2]
    if reduction == SoftmaxReduction():
        score_BHTS = jnp.where(visible_BHTS, score_BHTS, -jnp.inf)
        weight_BHTS, statistics = jax.nn.softmax(score_BHTS), (jax.nn.logsumexp(score_BHTS, -1),)
    else:
        weight_BHTS, masses = reduction.weigh_and_sum(score_BHTS)
        statistics = tuple(jnp.where(visible_BHTS, mass, 0.0).sum(-1) for mass in masses)
    return jnp.einsum('BHTS,BSHV->BTHV', jnp.where(visible_BHTS, weight_BHTS, 0.0), value_BSHV), statistics


REDUCTIONS = {
    'softmax': SoftmaxReduction(),
    'no statistic': LinearReduction(lambda score: (jnp.tanh(score), ())),
    'two statistics': LinearReduction(lambda score: (jnp.exp(score), (score**2, jnp.cos(score)))),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', REDUCTIONS)
def test_kernel_gradients_include_cotangents_of_statistics_under_every_mask(name):
    arrays, mask, reduction = draw_inputs(64, batch=len(MASKS)), combine_masks(LENGTH), REDUCTIONS[name]
    kernel_spec = KernelSpec(ScoreSpec(64**-0.5), mask)

    def compute_loss(arrays, reduce):
        output, statistics = reduce(arrays)
        rng = np.random.default_rng(3)
        return sum(jnp.sum(rng.normal(size=array.shape) * array) for array in (output, *statistics))

    with interpret_pallas():
        actual = jax.grad(compute_loss)(arrays, lambda arrays: run_kernels(tpu, reduction, kernel_spec, *arrays))
    expected = jax.grad(compute_loss)(arrays, lambda arrays: compute_with_matrices(reduction, arrays, mask))
    assert_close(actual, expected, 2e-5)


@pytest.mark.slow
def test_kernel_with_large_power_matches_reference():
    attention_spec, arrays = (
        make_attention_spec(make_attention_config('exp', 'p_norm', power=16.0), masks.make_causal_mask(1024)),
        draw_inputs(64, length=1024),
    )
    with interpret_pallas():
        result = kernel_attention.attend(tpu, *arrays, attention_spec).output_BTHK
    assert_close(result, reference.attend(*arrays, attention_spec).output_BTHK, 5e-5)


@pytest.mark.slow
def test_kernel_softmax_of_fully_masked_rows_has_finite_logsumexp():
    mask = masks.make_static_mask(np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32))
    with interpret_pallas():
        output, (lse,) = run_kernels(tpu, SoftmaxReduction(), KernelSpec(ScoreSpec(0.125), mask), *draw_inputs(64))
    assert (output == 0).all()
    assert (lse == np.float32(MASK_VALUE)).all()


@pytest.mark.slow
@pytest.mark.parametrize(('axes', 'mask'), [((2, 1, 2), 'documents'), ((1, 2, 2), 'causal')])
def test_kernel_results_are_equal_with_and_without_mesh(axes, mask):
    mesh = jax.make_mesh(axes, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
    mask, arrays = MASKS[mask](LENGTH), draw_inputs(64, batch=4)
    slope_H = jnp.asarray(compute_alibi_slopes(HEADS))

    def run(arrays, slope_H):
        attention_spec = make_attention_spec(
            make_attention_config('exp', 'plus_one'), mask, bias=make_alibi_bias(slope_H)
        )
        return jnp.sum(jnp.sin(kernel_attention.attend(tpu, *arrays, attention_spec).output_BTHK))

    with interpret_pallas():
        expected = jax.jit(jax.value_and_grad(run, (0, 1)))(arrays, slope_H)
        with jax.set_mesh(mesh):
            sharded = jax.jit(jax.value_and_grad(run, (0, 1)))(arrays, slope_H)
    assert_close(sharded, expected, 2e-5)
