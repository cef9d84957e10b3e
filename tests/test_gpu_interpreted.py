"""Pallas GPU kernels in the interpreter of JAX against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    MASKS,
    assert_close,
    combine_masks,
    compare_backend,
    compute_alibi_bias,
    draw_inputs,
    make_alibi_bias,
)
from gpu_problems import LENGTH, REDUCTIONS, make_problem, solve_with_matrices
from tiny_specs import make_attention_config

from sinklab.attn import mask
from sinklab.attn.pallas import gpu
from sinklab.attn.spec import ScoreBias


@pytest.fixture
def gpu_interpreter(monkeypatch):
    """Enable the interpreter of JAX for GPU kernels, and replace accumulators by explicit additions."""
    plgpu = pytest.importorskip('jax.experimental.pallas.mosaic_gpu')
    if not hasattr(plgpu, 'InterpretGPUParams'):
        pytest.skip(f'jax {jax.__version__} does not interpret GPU kernels')
    from sinklab.attn.pallas import gpu as gpu_module

    def accumulate(totals, *factors):
        return tuple(total + multiply_factors(*pair) for total, pair in zip(totals, factors, strict=True))

    def multiply_factors(left, right):
        if isinstance(left, jax.Array):  # in registers
            return jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        return gpu_module.multiply(left, right)

    monkeypatch.setattr(gpu_module, 'accumulate', accumulate)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'mask_name', 'width', 'bias_function', 'has_positions'),
    [
        ('softmax', 'all of them', 64, compute_alibi_bias, True),
        ('softmax', 'padded', 96, None, False),
        ('sigmoid', 'full', 128, compute_alibi_bias, False),
        ('squares', 'window', 64, None, False),
    ],
)
def test_gpu_kernels_match_definition_in_interpreter(
    gpu_interpreter, name, mask_name, width, bias_function, has_positions
):
    reduction, positions, masks = REDUCTIONS[name], None, combine_masks(LENGTH, ['documents', mask_name])
    if has_positions:
        position_BT = np.arange(LENGTH)[None] - np.asarray(masks.start_BT)
        positions = position_BT, position_BT
    kernel_spec, arrays = make_problem(
        masks if has_positions else MASKS[mask_name](LENGTH), width, bias_function=bias_function, positions=positions
    )
    float32_inputs = [array.astype(jnp.float32) for array in (*arrays, kernel_spec.parameter_HP)]
    expected, pullback = jax.vjp(functools.partial(solve_with_matrices, reduction, kernel_spec), *float32_inputs)
    actual = jax.jit(functools.partial(gpu.forward, reduction, kernel_spec))(*arrays)
    assert_close(actual, expected, 1e-2)
    output, statistics = expected
    rng = np.random.default_rng(2)
    d_output, *d_statistics = (
        jnp.asarray(rng.standard_normal(array.shape), jnp.float32) for array in (output, *statistics)
    )
    d_output = d_output.astype(jnp.bfloat16)
    *gradients, d_parameter_HP = pullback((d_output.astype(jnp.float32), tuple(d_statistics)))
    rows = reduction.compute_backward_rows(reduction.get_residuals(output, statistics), d_output, d_statistics)
    *actual, actual_HP = jax.jit(functools.partial(gpu.backward, reduction, kernel_spec))(*arrays, d_output, rows)
    assert_close(actual, gradients, 2e-2)
    if bias_function is not None:
        assert_close(actual_HP, d_parameter_HP, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('operation', 'length', 'columns'), [(('exp', 'plus_one'), 200, 0), (('sigmoid', 'sum'), 256, 1)]
)
def test_gpu_attention_matches_definition_in_interpreter(gpu_interpreter, operation, length, columns):
    """Use a length that needs padding, and learned columns with ALiBi."""
    arrays = draw_inputs(64, columns, length=length, dtype=jnp.bfloat16)
    bias = functools.partial(make_alibi_bias, columns=columns) if columns else ScoreBias
    compare_backend(
        'gpu', make_attention_config(*operation), mask.make_causal_mask(length), arrays, bias, columns, atol=1.5e-2
    )
