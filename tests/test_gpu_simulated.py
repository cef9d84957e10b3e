"""Whole GPU kernels on a simulated GPU against the definition."""

import functools

import fusing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import attention
from fusing import compared, drawn
from test_gpu import LENGTH, MASKS, alibi, assert_near, dense, documents, problem

from sinklab.attend import gpu, mask
from sinklab.attend.bias import Bias


@pytest.fixture
def simulated(monkeypatch):
    """jax's interpreter of GPU kernels: barriers and copies as they are, accumulators that are added to by hand."""
    plgpu = pytest.importorskip('jax.experimental.pallas.mosaic_gpu')
    if not hasattr(plgpu, 'InterpretGPUParams'):
        pytest.skip(f'jax {jax.__version__} does not interpret GPU kernels')
    from sinklab.attend import gpu_kernel

    def added(totals, *factors):
        return tuple(total + product(*one) for total, one in zip(totals, factors, strict=True))

    def product(left, right):
        if isinstance(left, jax.Array):  # in registers
            return jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        return gpu_kernel.multiplied(left, right)

    monkeypatch.setattr(gpu_kernel, 'added', added)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'shown', 'width', 'curve', 'placed'),
    [
        ('softmax', 'documents', 64, alibi, True),
        ('softmax', 'padded', 96, None, False),
        ('sigmoid', 'full', 128, alibi, False),
        ('squares', 'window', 64, None, False),
    ],
)
def test_kernels_are_right_on_a_simulated_gpu(simulated, name, shown, width, curve, placed):
    shown = MASKS[shown]()
    scores, weigh, arrays = problem(name, shown, width, curve=curve)
    position_BT = np.arange(LENGTH)[None] - documents()
    positions = (position_BT, position_BT) if placed else None
    expected, pull = jax.vjp(
        functools.partial(dense, scores, weigh, shown, positions=positions),
        *(one.astype(jnp.float32) for one in arrays),
    )
    *split, parameter_HP = arrays
    found = jax.jit(lambda *given: gpu.forward(scores, weigh, *given, shown, positions, parameter_HP))(*split)
    assert_near(found, expected, 1e-2)
    output, statistics = expected
    rng = np.random.default_rng(2)
    d_output, *d_statistics = (
        jnp.asarray(rng.standard_normal(one.shape), jnp.float32) for one in (output, *statistics)
    )
    d_output = d_output.astype(jnp.bfloat16)
    gradients = pull((d_output.astype(jnp.float32), tuple(d_statistics)))
    shift, moved = (None, d_statistics) if weigh else (statistics[0], [d_statistics[0] - (d_output * output).sum(-1)])
    found = jax.jit(
        lambda *given: gpu.backward(scores, weigh, *given, shown, positions, parameter_HP, shift, d_output, moved)
    )(*split)
    assert_near(found[:3], gradients[:3], 2e-2)
    if curve is not None:
        assert_near(found[3], gradients[3], 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('operation', 'length', 'columns'), [(('exp', 'plus_one'), 200, 0), (('sigmoid', 'sum'), 256, 1)]
)
def test_attention_by_simulated_kernels_is_the_definition(simulated, operation, length, columns):
    """A length that is padded; columns and ALiBi."""
    arrays = drawn(64, columns, length=length, dtype=jnp.bfloat16)
    bias = (lambda *_: fusing.alibi(columns=columns)) if columns else (lambda *_: Bias())
    compared('gpu', attention(*operation), mask.causal(length), arrays, bias, columns, atol=1.5e-2)
