import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinklab.train import loss
from sinklab.train.loss import cross_entropy


def arrays(batch=3, length=10, width=5, vocabulary=11, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (batch, length, width), dtype),
        jax.random.normal(keys[1], (vocabulary, width)),
        jax.random.randint(keys[2], (batch, length), 0, vocabulary),
    )


def whole(hidden, head, target):
    """The definition, through all logits."""
    log_p = jax.nn.log_softmax(jnp.einsum('btd,vd->btv', hidden.astype(jnp.float32), head))
    return -jnp.take_along_axis(log_p, target[..., None], -1).mean()


@pytest.mark.parametrize('rows', [1, 3, 12, 21, 512])  # one place at a time, some that do not divide, all
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(rows, monkeypatch):
    monkeypatch.setattr(loss, 'CHUNK_ROWS', rows)
    hidden, head, target = arrays()
    jax.clear_caches()
    for function in (cross_entropy, jax.jit(cross_entropy)):
        value, gradients = jax.value_and_grad(function, (0, 1))(hidden, head, target)
        expected, theirs = jax.value_and_grad(whole, (0, 1))(hidden, head, target)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(function(hidden, head, target), expected, rtol=1e-6)
        for ours, their in zip(gradients, theirs, strict=True):
            np.testing.assert_allclose(ours, their, atol=1e-7, rtol=1e-5)


def test_half_precision_keeps_a_gradient_in_float32_for_the_head():
    hidden, head, target = arrays(dtype=jnp.bfloat16)
    d_hidden, d_head = jax.grad(cross_entropy, (0, 1))(hidden, head, target)
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(d_head, jax.grad(whole, 1)(hidden, head, target), atol=5e-3)


def test_a_scaled_loss_scales_its_gradient():
    hidden, head, target = arrays()
    one = jax.grad(cross_entropy)(hidden, head, target)
    np.testing.assert_allclose(jax.grad(lambda h: 3 * cross_entropy(h, head, target))(hidden), 3 * one, rtol=1e-6)


def shapes(jaxpr):
    """Of everything that a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            inner = getattr(inner, 'jaxpr', inner)
            if hasattr(inner, 'eqns'):
                yield from shapes(inner)


@pytest.mark.parametrize('gradient', [False, True])
def test_the_logits_of_a_batch_never_exist_whole(gradient):
    hidden, head, target = arrays(batch=4, length=256, width=5, vocabulary=1000)
    function = jax.grad(cross_entropy, (0, 1)) if gradient else cross_entropy
    largest = max(int(np.prod(shape)) for shape in shapes(jax.make_jaxpr(function)(hidden, head, target).jaxpr))
    assert largest <= loss.CHUNK_ROWS * 1000 < target.size * 1000
