"""Tests of the chunked loss: value, gradients, meshes, memory and collectives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import count_devices
from jax.sharding import NamedSharding, PartitionSpec

from sinklab.config.spec import Layout
from sinklab.parallel import device_mesh, sharding
from sinklab.train import loss
from sinklab.train.loss import cross_entropy

LAYOUTS = [Layout(tensor=4), Layout(fsdp=2, tensor=2), Layout(data=2, fsdp=2)]  # test_train_step.py has more
AXES = (('batch', None, None), ('vocabulary', 'embed'), ('batch', None))  # of hidden, head and target
loss_and_gradients = jax.value_and_grad(cross_entropy, (0, 1))


def make_arrays(batch=4, length=10, width=8, vocabulary=12, dtype=jnp.float32):
    """Return (hidden_BTD, head_VD, target_BT); a third of the targets is negative."""
    rng = np.random.default_rng(0)
    target_BT = rng.integers(0, vocabulary, (batch, length))
    return (
        jnp.asarray(rng.normal(size=(batch, length, width)), dtype),
        jnp.asarray(rng.normal(size=(vocabulary, width)), jnp.float32),
        jnp.asarray(np.where(rng.random((batch, length)) < 1 / 3, ~target_BT, target_BT), jnp.int32),
    )


def compute_expected(hidden_BTD, head_VD, target_BT):
    """Compute (loss, d_hidden_BTD, d_head_VD) in float64 from all logits."""
    hidden_BTD, head_VD = (np.asarray(array, np.float64) for array in (hidden_BTD, head_VD))
    logits_BTV = np.einsum('btd,vd->btv', hidden_BTD, head_VD)
    logits_BTV -= logits_BTV.max(-1, keepdims=True)
    log_p_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    is_target_BTV = np.asarray(target_BT)[..., None] == np.arange(len(head_VD))
    is_counted_BT1 = np.asarray(target_BT)[..., None] >= 0
    d_logits_BTV = is_counted_BT1 * (np.exp(log_p_BTV) - is_target_BTV) / target_BT.size
    d_head_VD = np.einsum('btv,btd->vd', d_logits_BTV, hidden_BTD)
    return -(is_target_BTV * log_p_BTV).sum() / target_BT.size, d_logits_BTV @ head_VD, d_head_VD


def assert_close(actual, expected, dtype=jnp.float32):
    """Assert that loss and gradients are equal to a few roundings of the dtype.

    A difference is relative to the largest entry. Losses are compared at the precision of float32.
    """
    float32_tolerances = (1e-6, 2e-6, 2e-6)
    bfloat16_tolerances = (1e-6, 8e-3, 4e-3)
    (value, gradients), tolerances = actual, float32_tolerances if dtype == jnp.float32 else bfloat16_tolerances
    for actual_array, expected_array, tolerance in zip((value, *gradients), expected, tolerances, strict=True):
        difference = np.abs(np.asarray(actual_array, np.float64) - expected_array).max()
        assert difference <= tolerance * np.abs(expected_array).max(), (
            f'{difference} of {np.abs(expected_array).max()}'
        )


def round_head(head_VD, dtype):
    """Round the head to the dtype of a computation."""
    return head_VD.astype(dtype).astype(jnp.float32)


def make_sharded_loss(mesh, gradient=True):
    """Return `loss_and_gradients`, or the loss alone, sharded over the mesh as in a train step.

    Each device has its own rows and its part of the width of the head.
    """
    num_shards = sharding.count_batch_shards(mesh)
    if num_shards == 1:
        return loss_and_gradients if gradient else cross_entropy
    data_axes = ('data',) if mesh.shape['data'] > 1 else ()

    def compute_local(hidden, head, target):
        if not gradient:
            return jax.lax.pmean(cross_entropy(hidden, head, target), sharding.BATCH_AXES)
        value, (d_hidden, d_head) = loss_and_gradients(hidden, head, target)
        return jax.lax.pmean(value, sharding.BATCH_AXES), (
            d_hidden / num_shards,
            jax.lax.psum(d_head, data_axes) / num_shards,
        )

    row_spec, head_spec = PartitionSpec(sharding.BATCH_AXES), PartitionSpec(None, 'fsdp')
    manual_axes = {axis for axis, size in mesh.shape.items() if axis in sharding.BATCH_AXES or size == 1}
    return jax.shard_map(
        compute_local,
        in_specs=(row_spec, head_spec, row_spec),
        out_specs=(PartitionSpec(), (row_spec, head_spec)) if gradient else PartitionSpec(),
        axis_names=manual_axes,
        check_vma=False,
    )


def place_arrays(mesh, arrays):
    """Place arrays on the mesh as a run does."""
    return [
        jax.device_put(
            array,
            NamedSharding(
                mesh, sharding.drop_indivisible_axes(mesh, array.shape, sharding.logical_to_mesh_axes(*names))
            ),
        )
        for array, names in zip(arrays, AXES, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize('rows', [1, 3, 13, 20, 39, 512])  # one row, numbers that do not divide the rows, all rows
def test_chunked_loss_and_gradients_match_float64_reference(rows, monkeypatch):
    monkeypatch.setattr(loss, 'MIN_CHUNK_ROWS', rows)
    jax.clear_caches()
    inputs = make_arrays(batch=3, length=13)
    expected = compute_expected(*inputs)
    for transform in (lambda function: function, jax.jit):
        assert_close(transform(loss_and_gradients)(*inputs), expected)
        np.testing.assert_allclose(transform(cross_entropy)(*inputs), expected[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
@pytest.mark.parametrize('sizes', [dict(), dict(length=7, vocabulary=13)], ids=['all_divided', 'batch_alone'])
def test_loss_and_gradients_match_reference_on_every_mesh(sizes, layout, dtype, monkeypatch):
    monkeypatch.setattr(loss, 'MIN_CHUNK_ROWS', 3)
    jax.clear_caches()
    hidden, head, target = make_arrays(**sizes, dtype=dtype)
    mesh = device_mesh.make_mesh(layout)
    with jax.set_mesh(mesh):
        inputs = place_arrays(mesh, (hidden, head, target))
        actual, value = jax.jit(make_sharded_loss(mesh))(*inputs), jax.jit(cross_entropy)(*inputs)
    expected = compute_expected(hidden, round_head(head, dtype), target)
    assert_close(actual, expected, dtype)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)


def test_bfloat16_loss_gives_float32_head_gradient():
    hidden, head, target = make_arrays(dtype=jnp.bfloat16)
    _, (d_hidden, d_head) = loss_and_gradients(hidden, head, target)
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(
        loss_and_gradients(hidden, head, target),
        compute_expected(hidden, round_head(head, jnp.bfloat16), target),
        jnp.bfloat16,
    )


@pytest.mark.slow
def test_head_gradient_accumulates_in_float32_over_chunks(monkeypatch):
    monkeypatch.setattr(loss, 'MIN_CHUNK_ROWS', 1)
    jax.clear_caches()
    rows = 4096  # a sum of ones stays at 256 in bfloat16
    hidden_BTD = jnp.ones((1, rows, 1), jnp.bfloat16)
    d_head_VD = jax.grad(cross_entropy, 1)(hidden_BTD, jnp.zeros((4, 1)), jnp.zeros((1, rows), int))
    np.testing.assert_array_equal(d_head_VD[:, 0], [-0.75, 0.25, 0.25, 0.25])


def test_scaled_loss_scales_gradients():
    hidden, head, target = make_arrays()
    _, gradients = loss_and_gradients(hidden, head, target)
    tripled_gradients = jax.grad(lambda *inputs: 3 * cross_entropy(*inputs, target), (0, 1))(hidden, head)
    for tripled_gradient, gradient in zip(tripled_gradients, gradients, strict=True):
        np.testing.assert_allclose(tripled_gradient, 3 * gradient, rtol=1e-6)


def test_negative_target_counts_in_mean_with_zero_loss():
    hidden, head, _ = make_arrays()
    target = jnp.zeros((4, 10), int).at[1:].set(-5)
    value, (d_hidden, _) = loss_and_gradients(hidden, jnp.zeros_like(head), target)
    np.testing.assert_allclose(value, math.log(12) / 4, rtol=1e-6)
    assert not d_hidden[1:].any()
    value, gradients = loss_and_gradients(hidden, head, jnp.full_like(target, -1))
    assert not any(array.any() for array in (value, *gradients))


@pytest.mark.slow
@pytest.mark.parametrize('layout', [Layout(), Layout(tensor=4)], ids=str)
def test_target_beyond_vocabulary_gives_nan(layout):
    hidden, head, target = make_arrays()
    with jax.set_mesh(device_mesh.make_mesh(layout)):
        assert jnp.isnan(cross_entropy(hidden, head, target.at[2, 3].set(12)))


@pytest.mark.slow
def test_large_logits_do_not_overflow():
    hidden_BTD, head_VD = jnp.ones((1, 2, 1)), jnp.array([[1e30], [-1e30]])
    for mesh in (device_mesh.make_mesh(Layout()), device_mesh.make_mesh(Layout(tensor=2))):
        with jax.set_mesh(mesh):
            value, (_, d_head_VD) = loss_and_gradients(hidden_BTD, head_VD, jnp.array([[0, 1]]))
        np.testing.assert_allclose(value, 1e30, rtol=1e-6)
        np.testing.assert_array_equal(d_head_VD, [[0.5], [-0.5]])


BATCH, LENGTH, WIDTH, VOCABULARY = 4, 4096, 20, 1004  # sizes that no other array of the program has


@functools.cache
def compile_loss(layout, gradient=True):
    mesh = device_mesh.make_mesh(layout)
    shapes = ((BATCH, LENGTH, WIDTH), jnp.float32), ((VOCABULARY, WIDTH), jnp.float32), ((BATCH, LENGTH), jnp.int32)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, sharding.logical_to_mesh_axes(*names)) for names in AXES]
        inputs = [jax.ShapeDtypeStruct(*shape, sharding=s) for shape, s in zip(shapes, shardings, strict=True)]
        return jax.jit(make_sharded_loss(mesh, gradient)).lower(*inputs).compile()


def find_shapes(text):
    """Return the shapes of all arrays in the text of a compiled program."""
    return [
        tuple(map(int, dimensions.split(','))) for dimensions in re.findall(r'\b(?:pred|[a-z]+\d+)\[([\d,]+)\]', text)
    ]


@pytest.mark.slow
@pytest.mark.parametrize('gradient', [False, True], ids=['loss', 'gradients'])
@pytest.mark.parametrize('layout', [Layout(), *LAYOUTS], ids=str)
def test_compiled_loss_never_holds_logits_of_whole_batch(layout, gradient):
    program = compile_loss(layout, gradient)
    assert max(map(math.prod, find_shapes(program.as_text()))) == loss.MIN_CHUNK_ROWS * VOCABULARY
    logits_bytes = 4 * BATCH * LENGTH * VOCABULARY / count_devices(layout)
    assert program.memory_analysis().temp_size_in_bytes < logits_bytes / 2
