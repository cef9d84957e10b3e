"""What is minimized: the loss of a batch, and its gradient by micro-batches."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab import exchange, sharding
from sinklab.model.capture import Intermediates
from sinklab.spec import Spec
from sinklab.targets import is_in_loss, strip_loss_mask
from sinklab.train import state
from sinklab.train.forward import make_forward
from sinklab.train.loss import cross_entropy


def make_loss(spec: Spec, first_target: int = 1, **model_options) -> Callable:
    """loss(params, ids_BT of T + 1) -> the mean cross-entropy of what follows the tokens first..T."""
    loss = make_loss_with_intermediates(spec, first_target, **model_options)
    return lambda params, ids_BT: loss(params, ids_BT)[0]


def make_loss_with_intermediates(spec: Spec, first_target: int = 1, **model_options) -> Callable:
    """loss(params, ids_BT of T + 1) -> (the mean cross-entropy of what follows the tokens first..T, Capture).

    What is not predicted counts for the mean, with a loss of 0.
    """
    apply_model = make_forward(spec, **model_options)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, Intermediates]:
        hidden_BTD, head_VD, intermediates = apply_model(params, strip_loss_mask(ids_BT)[:, :-1])
        return cross_entropy(hidden_BTD[:, first_target - 1 :], head_VD, ids_BT[:, first_target:]), intermediates

    return loss


def compute_predicted_fraction(ids_BT: jax.Array, first_target: int = 1) -> jax.Array:
    """The share of targets that are predicted; with none, 1, so that it can divide."""
    xp = ids_BT.__array_namespace__()
    fraction = xp.mean(is_in_loss(ids_BT[:, first_target:]).astype('float32'))
    return xp.where(fraction > 0, fraction, 1.0)


def make_data_parallel_loss(loss: Callable, spec: Spec, mesh: jax.sharding.Mesh) -> Callable:
    """A loss (params, ids_BT) that is a mean over sequences, by each device of its own ones."""

    def local_loss(params: dict, ids_BT: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss(params, ids_BT), sharding.BATCH_AXES)

    param_shardings = state.get_state_shardings(spec, mesh)['params']
    return exchange.shard_map_over_batch(local_loss, mesh, param_shardings) if sharding.count_shards(mesh) > 1 else loss


def make_value_and_grad(loss: Callable, spec: Spec, mesh: jax.sharding.Mesh, num_micro_batches: int) -> Callable:
    """take(params, ids_BT) -> ((loss, numbers), gradient) of the whole batch, in `parts` one after another.

    Each device takes its own sequences. Of the gradient it keeps its parts: sums along the axes that divide a
    parameter are parted as they are made, in every micro-batch, and those along others are made once, at the end.
    """
    value_and_grad = functools.partial(accumulate_gradients, jax.value_and_grad(loss, has_aux=True), num_micro_batches)
    param_shardings = state.get_state_shardings(spec, mesh)['params']

    def reduce_gradient(gradient: jax.Array, leaf_sharding: jax.sharding.NamedSharding) -> jax.Array:
        reduce_axes = tuple(
            axis for axis in sharding.BATCH_AXES if axis not in sharding.list_mesh_axes(leaf_sharding.spec) and mesh.shape[axis] > 1
        )
        return jax.lax.psum(gradient, reduce_axes) / sharding.count_shards(mesh)

    def local_value_and_grad(params: dict, ids_BT: jax.Array) -> tuple[tuple, dict]:
        value_and_aux, gradient = value_and_grad(params, ids_BT)
        return jax.lax.pmean(value_and_aux, sharding.BATCH_AXES), jax.tree.map(reduce_gradient, gradient, param_shardings)

    return exchange.shard_map_over_batch(local_value_and_grad, mesh, param_shardings, returns_gradient=True) if sharding.count_shards(mesh) > 1 else value_and_grad


def accumulate_gradients(value_and_grad: Callable, num_micro_batches: int, params: dict, ids_BT: jax.Array) -> tuple[tuple, dict]:
    """The mean of what is taken of each micro-batch."""
    if num_micro_batches == 1:
        return value_and_grad(params, ids_BT)

    micro_batches = ids_BT.reshape(num_micro_batches, -1, ids_BT.shape[-1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(value_and_grad, params, micro_batches[0]))
    total, _ = jax.lax.scan(
        lambda total, ids_BT: (jax.tree.map(jnp.add, total, value_and_grad(params, ids_BT)), None), zeros, micro_batches
    )
    return jax.tree.map(lambda x: x / num_micro_batches, total)
