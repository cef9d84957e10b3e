"""Next-token cross-entropy in chunks, without the logits of a whole batch."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sinklab.loss_mask import exclude_from_loss, is_in_loss
from sinklab.model.transformer import EMBEDDING_AXES
from sinklab.parallel import collectives, sharding
from sinklab.parallel.param_einsum import transpose_with_barrier

MIN_CHUNK_ROWS = 512  # minimum rows of logits, as wide as the vocabulary, that are computed at once


@jax.custom_vjp
def cross_entropy(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Compute the mean of -log softmax(hidden head^T)[target] in chunks; 0 where the target is negative."""
    return sum_losses(hidden_BTD, head_VD, target_BT, gradient=False)[0] / target_BT.size


def cross_entropy_forward(hidden_BTD, head_VD, target_BT):
    """Compute the gradient of each chunk with its loss, so that the backward pass needs no logits."""
    total, d_hidden_BTD, d_head_VD = sum_losses(hidden_BTD, head_VD, target_BT, gradient=True)
    return total / target_BT.size, (d_hidden_BTD, d_head_VD.astype(head_VD.dtype), target_BT.size)


def cross_entropy_backward(residuals, d_loss):
    d_hidden_BTD, d_head_VD, size = residuals
    scale = d_loss / size
    return (d_hidden_BTD * scale).astype(d_hidden_BTD.dtype), (d_head_VD * scale).astype(d_head_VD.dtype), None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward)


def sum_losses(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool) -> tuple:
    """Return (sum of losses, d_hidden_BTD, d_head_VD in float32); without `gradient`, (sum, None, None)."""
    head_VD = collectives.all_gather(head_VD.astype(hidden_BTD.dtype), *EMBEDDING_AXES)
    total, d_hidden_BTD, d_head_VD = sum_losses_gathered(hidden_BTD, head_VD, target_BT, gradient)
    return total, d_hidden_BTD, collectives.reduce_scatter(d_head_VD, *EMBEDDING_AXES) if gradient else None


@functools.partial(jax.jit, static_argnames='gradient')
def sum_losses_gathered(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool) -> tuple:
    """Sum the losses with a head that is gathered along its width; its vocabulary may be sharded."""
    head_spec = sharding.make_auto_partition_spec(head_VD.shape[:1], ['vocabulary'])
    vocabulary_axes = tuple(sharding.list_mesh_axes(head_spec))
    replicated = PartitionSpec()
    sum_local = functools.partial(sum_losses_sharded, gradient=gradient, vocabulary_axes=vocabulary_axes)
    in_out_specs = (replicated, head_spec, replicated), (replicated, replicated, head_spec)
    return sharding.shard_map_auto_axes(sum_local, vocabulary_axes, *in_out_specs)(hidden_BTD, head_VD, target_BT)


def sum_losses_sharded(
    hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool, vocabulary_axes: tuple[str, ...]
) -> tuple:
    """Sum the losses on devices that each have a part of the vocabulary."""

    def body(d_head_DV, chunk):
        hidden_RD, target_R = chunk
        total, d_logits_RV = sum_chunk_losses(hidden_RD, head_VD, target_R, vocabulary_axes)
        if not gradient:
            return None, (total, None)
        d_logits_RV = d_logits_RV.astype(hidden_RD.dtype)
        d_hidden_RD = jnp.einsum('RV,VD->RD', d_logits_RV, head_VD, preferred_element_type=jnp.float32)
        hidden_DR = transpose_with_barrier('RD->DR', hidden_RD)
        d_head_DV += jnp.einsum('DR,RV->DV', hidden_DR, d_logits_RV, preferred_element_type=jnp.float32)
        return d_head_DV, (total, d_hidden_RD if vocabulary_axes else d_hidden_RD.astype(hidden_RD.dtype))

    # With as many rows as the width of the head, the logits of a chunk are about as large as the head's gradient.
    num_rows = max(MIN_CHUNK_ROWS, head_VD.shape[1]) * jax.lax.axis_size(vocabulary_axes)
    zeros_DV = jnp.zeros(head_VD.shape[::-1], jnp.float32) if gradient else None
    d_head_DV, (total_N, d_hidden_NRD) = jax.lax.scan(
        body, zeros_DV, split_into_chunks(hidden_BTD, target_BT, num_rows)
    )
    if not gradient:
        return total_N.sum(), None, None
    d_hidden_RD = d_hidden_NRD.reshape(-1, hidden_BTD.shape[-1])[: target_BT.size]
    d_hidden_BTD = d_hidden_RD.reshape(hidden_BTD.shape)
    if vocabulary_axes:  # summed in float32, as all sums over devices
        d_hidden_BTD = jax.lax.psum(d_hidden_BTD, vocabulary_axes).astype(hidden_BTD.dtype)
    return total_N.sum(), d_hidden_BTD, transpose_with_barrier('DV->VD', d_head_DV)


def sum_chunk_losses(
    hidden_RD: jax.Array, head_VD: jax.Array, target_R: jax.Array, vocabulary_axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of losses, d_logits_RV); both are non-finite if a target is outside the vocabulary."""
    logits_RV = jnp.einsum('RD,VD->RV', hidden_RD, head_VD, preferred_element_type=jnp.float32)
    max_R = logits_RV.max(-1)
    if vocabulary_axes:
        max_R = jax.lax.pmax(max_R, vocabulary_axes)
    exponential_RV = jnp.exp(logits_RV - max_R[:, None])
    local_target_R = target_R - len(head_VD) * jax.lax.axis_index(vocabulary_axes)
    target_ref = logits_RV.at[jnp.arange(len(local_target_R)), local_target_R]
    target_logit_R = target_ref.get(mode='fill', fill_value=0, wrap_negative_indices=False)
    Z_R, target_logit_R = jax.lax.psum((exponential_RV.sum(-1), target_logit_R), vocabulary_axes)
    vocabulary_size = len(head_VD) * jax.lax.axis_size(vocabulary_axes)
    weight_R = jnp.where(target_R < vocabulary_size, is_in_loss(target_R), jnp.nan)
    is_target_RV = local_target_R[:, None] == jnp.arange(len(head_VD))
    d_logits_RV = (weight_R / Z_R)[:, None] * exponential_RV - is_target_RV
    return (weight_R * (max_R + jnp.log(Z_R) - target_logit_R)).sum(), d_logits_RV


def split_into_chunks(hidden_BTD: jax.Array, target_BT: jax.Array, max_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return (hidden_NRD, target_NR): N equal chunks of at most `max_rows` rows, the last one padded."""
    num_chunks = max(1, -(-target_BT.size // max_rows))
    padding = -target_BT.size % num_chunks
    hidden_RD = jnp.pad(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), ((0, padding), (0, 0)))
    target_R = jnp.pad(target_BT.reshape(-1), (0, padding), constant_values=exclude_from_loss(0))
    return hidden_RD.reshape(num_chunks, -1, hidden_RD.shape[-1]), target_R.reshape(num_chunks, -1)
