"""Next-token cross-entropy without the logits of a whole batch: chunks of rows, on what each device holds of them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sinklab import sharding
from sinklab.targets import is_predicted, unpredicted

CHUNK_ROWS = 512  # rows of logits, as wide as the whole vocabulary, that a device has room for


class Cut(NamedTuple):
    """The axes of the mesh that divide each dimension here; none outside a mesh."""

    batch: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()


@jax.custom_vjp
def cross_entropy(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Mean of -log softmax(hidden head^T)[target], 0 where the target is below 0, chunk by chunk."""
    return global_sums(hidden_BTD, head_VD, target_BT, gradient=False)[0] / target_BT.size


def forward(hidden_BTD, head_VD, target_BT):
    """Takes each chunk's gradient while its logits are at hand, so that the backward pass needs none."""
    total, d_hidden_BTD, d_head_VD = global_sums(hidden_BTD, head_VD, target_BT, gradient=True)
    return total / target_BT.size, (d_hidden_BTD, d_head_VD.astype(head_VD.dtype), target_BT.size)


def backward(residuals, d_loss):
    d_hidden_BTD, d_head_VD, size = residuals
    scale = d_loss / size
    return (d_hidden_BTD * scale).astype(d_hidden_BTD.dtype), (d_head_VD * scale).astype(d_head_VD.dtype), None


cross_entropy.defvjp(forward, backward)


@functools.partial(jax.jit, static_argnames='gradient')
def global_sums(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool) -> tuple:
    """`local_sums` of every device's rows and part of the vocabulary, added; the head is gathered along its width."""
    head_VD = sharding.place(head_VD.astype(hidden_BTD.dtype), 'vocabulary', 'embed')  # or float32 is gathered
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local_sums(hidden_BTD, head_VD, target_BT, Cut(), gradient)
    batch, vocabulary, embed = map(
        functools.partial(axes, mesh), ('batch', 'vocabulary', 'embed'), (len(target_BT), *head_VD.shape)
    )
    cut = Cut(batch, vocabulary, tuple(axis for axis in embed if axis in batch))
    rows, columns = PartitionSpec(cut.batch), PartitionSpec(cut.vocabulary)
    return jax.shard_map(
        functools.partial(local_sums, cut=cut, gradient=gradient),
        in_specs=(rows, columns, rows),
        out_specs=(PartitionSpec(), rows, PartitionSpec(cut.vocabulary, cut.embed)),
    )(hidden_BTD, head_VD, target_BT)


def axes(mesh: jax.sharding.AbstractMesh, name: str, size: int) -> tuple[str, ...]:
    """The axes of the mesh, of more than one device, that divide a logical axis if they can divide this size."""
    (entry,) = sharding.dividing(mesh, (size,), sharding.partition(name))
    entry = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in entry if mesh.shape[axis] > 1)


def local_sums(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, cut: Cut, gradient: bool) -> tuple:
    """(sum of all losses, its d_hidden_BTD, its d_head_VD in float32); without `gradient`, two times None."""

    def body(d_head_DV, chunk):
        hidden_RD, target_R = chunk
        total, d_logits_RV = chunk_sum(hidden_RD, head_VD, target_R, cut)
        if not gradient:
            return None, (total, None)
        d_logits_RV = d_logits_RV.astype(hidden_RD.dtype)
        d_hidden_RD = jnp.einsum('RV,VD->RD', d_logits_RV, head_VD, preferred_element_type=jnp.float32)
        # Of the two transposes, the one that a CPU multiplies faster.
        d_head_DV += jnp.einsum('RD,RV->DV', hidden_RD, d_logits_RV, preferred_element_type=jnp.float32)
        return d_head_DV, (total, d_hidden_RD.astype(hidden_RD.dtype))

    rows = CHUNK_ROWS * jax.lax.axis_size(cut.vocabulary)
    zeros_DV = jnp.zeros(head_VD.shape[::-1], jnp.float32) if gradient else None
    zeros_DV = jax.lax.pcast(zeros_DV, cut.batch + cut.vocabulary, to='varying')
    d_head_DV, (total_N, d_hidden_NRD) = jax.lax.scan(body, zeros_DV, chunks(hidden_BTD, target_BT, rows))
    total = jax.lax.psum(total_N.sum(), cut.batch)
    if not gradient:
        return total, None, None
    d_hidden_RD = d_hidden_NRD.reshape(-1, hidden_BTD.shape[-1])[: target_BT.size]
    d_hidden_BTD = jax.lax.psum(d_hidden_RD.reshape(hidden_BTD.shape), cut.vocabulary)
    return total, d_hidden_BTD, over_batch(d_head_DV.T, cut)


def chunk_sum(hidden_RD: jax.Array, head_VD: jax.Array, target_R: jax.Array, cut: Cut) -> tuple[jax.Array, jax.Array]:
    """(sum of the losses, its d_logits_RV); neither is finite where a target is beyond the vocabulary."""
    logits_RV = jnp.einsum('RD,VD->RV', hidden_RD, head_VD, preferred_element_type=jnp.float32)
    highest_R = logits_RV.max(-1)
    if cut.vocabulary:
        highest_R = jax.lax.pmax(highest_R, cut.vocabulary)
    exponential_RV = jnp.exp(logits_RV - highest_R[:, None])
    column_R = target_R - len(head_VD) * jax.lax.axis_index(cut.vocabulary)
    at_target = logits_RV.at[jnp.arange(len(column_R)), column_R]
    logit_R = at_target.get(mode='fill', fill_value=0, wrap_negative_indices=False)
    Z_R, logit_R = jax.lax.psum((exponential_RV.sum(-1), logit_R), cut.vocabulary)
    vocabulary = len(head_VD) * jax.lax.axis_size(cut.vocabulary)
    weight_R = jnp.where(target_R < vocabulary, is_predicted(target_R), jnp.nan)
    is_target_RV = column_R[:, None] == jnp.arange(len(head_VD))
    d_logits_RV = (weight_R / Z_R)[:, None] * exponential_RV - is_target_RV
    return (weight_R * (highest_R + jnp.log(Z_R) - logit_R)).sum(), d_logits_RV


def over_batch(d_head_VD: jax.Array, cut: Cut) -> jax.Array:
    """The sum over the devices that divide the batch; those that divide the head's width keep their part of it."""
    if cut.embed:
        d_head_VD = jax.lax.psum_scatter(d_head_VD, cut.embed, scatter_dimension=1, tiled=True)
    return jax.lax.psum(d_head_VD, tuple(axis for axis in cut.batch if axis not in cut.embed))


def chunks(hidden_BTD: jax.Array, target_BT: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(hidden_NRD, target_NR) of N equal chunks, of at most so many rows; what is not predicted fills up the last."""
    number = max(1, -(-target_BT.size // rows))
    padding = -target_BT.size % number
    hidden_RD = jnp.pad(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), ((0, padding), (0, 0)))
    target_R = jnp.pad(target_BT.reshape(-1), (0, padding), constant_values=unpredicted(0))
    return hidden_RD.reshape(number, -1, hidden_RD.shape[-1]), target_R.reshape(number, -1)
