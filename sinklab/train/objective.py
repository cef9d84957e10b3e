"""What is minimized: the loss of a batch, and its gradient by micro-batches."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab import exchange, sharding
from sinklab.model.capture import Capture
from sinklab.spec import Spec
from sinklab.targets import is_predicted, readable
from sinklab.train import state
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


def over_devices(loss: Callable, spec: Spec, mesh: jax.sharding.Mesh) -> Callable:
    """A loss (params, ids_BT) that is a mean over sequences, by each device of its own ones."""

    def local(params: dict, ids_BT: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss(params, ids_BT), sharding.BATCH)

    places = state.shardings(spec, mesh)['params']
    return exchange.on_each(local, mesh, places) if sharding.ways(mesh) > 1 else loss


def value_and_gradient(loss: Callable, spec: Spec, mesh: jax.sharding.Mesh, parts: int) -> Callable:
    """take(params, ids_BT) -> ((loss, numbers), gradient) of the whole batch, in `parts` one after another.

    Each device takes its own sequences. Of the gradient it keeps its parts: sums along the axes that divide a
    parameter are parted as they are made, in every micro-batch, and those along others are made once, at the end.
    """
    take = functools.partial(accumulated, jax.value_and_grad(loss, has_aux=True), parts)
    places = state.shardings(spec, mesh)['params']

    def added(gradient: jax.Array, place: jax.sharding.NamedSharding) -> jax.Array:
        others = tuple(
            axis for axis in sharding.BATCH if axis not in sharding.axes_of(place.spec) and mesh.shape[axis] > 1
        )
        return jax.lax.psum(gradient, others) / sharding.ways(mesh)

    def local(params: dict, ids_BT: jax.Array) -> tuple[tuple, dict]:
        numbers, gradient = take(params, ids_BT)
        return jax.lax.pmean(numbers, sharding.BATCH), jax.tree.map(added, gradient, places)

    return exchange.on_each(local, mesh, places, gradient=True) if sharding.ways(mesh) > 1 else take


def accumulated(take: Callable, parts: int, params: dict, ids_BT: jax.Array) -> tuple[tuple, dict]:
    """The mean of what is taken of each micro-batch."""
    if parts == 1:
        return take(params, ids_BT)

    micro = ids_BT.reshape(parts, -1, ids_BT.shape[-1])
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(take, params, micro[0]))
    total, _ = jax.lax.scan(
        lambda total, ids_BT: (jax.tree.map(jnp.add, total, take(params, ids_BT)), None), zero, micro
    )
    return jax.tree.map(lambda x: x / parts, total)
