"""What is minimized: the loss of a batch, and its gradient by micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab import sharding
from sinklab.model.capture import Capture
from sinklab.spec import Spec
from sinklab.targets import is_predicted, readable
from sinklab.train.forward import forward
from sinklab.train.loss import cross_entropy


def loss_of(spec: Spec, first: int = 1, **how) -> Callable:
    """loss(params, ids_BT of T + 1) -> the mean cross-entropy of what follows the tokens first..T."""
    loss = loss_and_capture(spec, first, **how)
    return lambda params, ids_BT: loss(params, ids_BT)[0]


def loss_and_capture(spec: Spec, first: int = 1, **how) -> Callable:
    """loss(params, ids_BT of T + 1) -> (the mean cross-entropy of what follows the tokens first..T, Capture).

    What is not predicted counts for the mean, with a loss of 0.
    """
    run = forward(spec, **how)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, Capture]:
        hidden_BTD, head_VD, captured = run(params, readable(ids_BT)[:, :-1])
        return cross_entropy(hidden_BTD[:, first - 1 :], head_VD, ids_BT[:, first:]), captured

    return loss


def predicted_share(ids_BT: jax.Array, first: int = 1) -> jax.Array:
    """The share of targets that are predicted; with none, 1, so that it can divide."""
    array = ids_BT.__array_namespace__()
    share = array.mean(is_predicted(ids_BT[:, first:]).astype('float32'))
    return array.where(share > 0, share, 1.0)


def value_and_gradient(loss: Callable, params: dict, ids_BT: jax.Array, parts: int) -> tuple[tuple, dict]:
    """((loss, numbers), gradient) of the whole batch, `parts` micro-batches one after another."""
    take = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        return take(params, ids_BT)

    micro = sharding.place(ids_BT.reshape(parts, -1, ids_BT.shape[-1]), None, 'batch', None)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(take, params, micro[0]))
    total, _ = jax.lax.scan(
        lambda total, ids_BT: (jax.tree.map(jnp.add, total, take(params, ids_BT)), None), zero, micro
    )
    return jax.tree.map(lambda x: x / parts, total)
