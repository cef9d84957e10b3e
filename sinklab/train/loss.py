"""Next-token cross-entropy without the logits of a whole batch: chunks of rows, on what each device holds of them."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sinklab import exchange, sharding
from sinklab.model.parameter import transposed
from sinklab.model.transformer import TABLE
from sinklab.targets import is_predicted, unpredicted

LEAST_ROWS = 512  # of logits, as wide as the whole vocabulary, that are made at once


@jax.custom_vjp
def cross_entropy(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Mean of -log softmax(hidden head^T)[target], 0 where the target is below 0, chunk by chunk."""
    return sums(hidden_BTD, head_VD, target_BT, gradient=False)[0] / target_BT.size


def forward(hidden_BTD, head_VD, target_BT):
    """Takes each chunk's gradient while its logits are at hand, so that the backward pass needs none."""
    total, d_hidden_BTD, d_head_VD = sums(hidden_BTD, head_VD, target_BT, gradient=True)
    return total / target_BT.size, (d_hidden_BTD, d_head_VD.astype(head_VD.dtype), target_BT.size)


def backward(residuals, d_loss):
    d_hidden_BTD, d_head_VD, size = residuals
    scale = d_loss / size
    return (d_hidden_BTD * scale).astype(d_hidden_BTD.dtype), (d_head_VD * scale).astype(d_head_VD.dtype), None


cross_entropy.defvjp(forward, backward)


def sums(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool) -> tuple:
    """(sum of all losses, its d_hidden_BTD, its d_head_VD in float32); without `gradient`, two times None."""
    head_VD = exchange.whole(head_VD.astype(hidden_BTD.dtype), *TABLE)
    total, d_hidden_BTD, d_head_VD = sums_of_whole(hidden_BTD, head_VD, target_BT, gradient)
    return total, d_hidden_BTD, exchange.part(d_head_VD, *TABLE) if gradient else None


@functools.partial(jax.jit, static_argnames='gradient')
def sums_of_whole(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool) -> tuple:
    """`sums`, with a head as wide as the model; its columns may be the compiler's to divide."""
    of_head = sharding.compilers(head_VD.shape[:1], ['vocabulary'])
    columns, replicas = tuple(sharding.axes_of(of_head)), PartitionSpec()
    run = functools.partial(sums_of_columns, gradient=gradient, columns=columns)
    places = (replicas, of_head, replicas), (replicas, replicas, of_head)
    return sharding.on_each_part(run, columns, *places)(hidden_BTD, head_VD, target_BT)


def sums_of_columns(
    hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, gradient: bool, columns: tuple[str, ...] = ()
) -> tuple:
    """`sums`, of devices that have columns of the logits each."""

    def body(d_head_DV, chunk):
        hidden_RD, target_R = chunk
        total, d_logits_RV = chunk_sum(hidden_RD, head_VD, target_R, columns)
        if not gradient:
            return None, (total, None)
        d_logits_RV = d_logits_RV.astype(hidden_RD.dtype)
        d_hidden_RD = jnp.einsum('RV,VD->RD', d_logits_RV, head_VD, preferred_element_type=jnp.float32)
        hidden_DR = transposed('RD->DR', hidden_RD)
        d_head_DV += jnp.einsum('DR,RV->DV', hidden_DR, d_logits_RV, preferred_element_type=jnp.float32)
        return d_head_DV, (total, d_hidden_RD if columns else d_hidden_RD.astype(hidden_RD.dtype))

    rows = chunk_rows(head_VD.shape[1]) * jax.lax.axis_size(columns)
    zeros_DV = jnp.zeros(head_VD.shape[::-1], jnp.float32) if gradient else None
    d_head_DV, (total_N, d_hidden_NRD) = jax.lax.scan(body, zeros_DV, chunks(hidden_BTD, target_BT, rows))
    if not gradient:
        return total_N.sum(), None, None
    d_hidden_RD = d_hidden_NRD.reshape(-1, hidden_BTD.shape[-1])[: target_BT.size]
    d_hidden_BTD = d_hidden_RD.reshape(hidden_BTD.shape)
    if columns:  # added in float32, as all that devices add
        d_hidden_BTD = jax.lax.psum(d_hidden_BTD, columns).astype(hidden_BTD.dtype)
    return total_N.sum(), d_hidden_BTD, transposed('DV->VD', d_head_DV)


def chunk_rows(width: int) -> int:
    """As many rows as the head is wide: a chunk's logits are then no more than the gradient that it is added to."""
    return max(LEAST_ROWS, width)


def chunk_sum(
    hidden_RD: jax.Array, head_VD: jax.Array, target_R: jax.Array, columns: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """(sum of the losses, its d_logits_RV); neither is finite where a target is beyond the vocabulary."""
    logits_RV = jnp.einsum('RD,VD->RV', hidden_RD, head_VD, preferred_element_type=jnp.float32)
    highest_R = logits_RV.max(-1)
    if columns:
        highest_R = jax.lax.pmax(highest_R, columns)
    exponential_RV = jnp.exp(logits_RV - highest_R[:, None])
    column_R = target_R - len(head_VD) * jax.lax.axis_index(columns)
    at_target = logits_RV.at[jnp.arange(len(column_R)), column_R]
    logit_R = at_target.get(mode='fill', fill_value=0, wrap_negative_indices=False)
    Z_R, logit_R = jax.lax.psum((exponential_RV.sum(-1), logit_R), columns)
    vocabulary = len(head_VD) * jax.lax.axis_size(columns)
    weight_R = jnp.where(target_R < vocabulary, is_predicted(target_R), jnp.nan)
    is_target_RV = column_R[:, None] == jnp.arange(len(head_VD))
    d_logits_RV = (weight_R / Z_R)[:, None] * exponential_RV - is_target_RV
    return (weight_R * (highest_R + jnp.log(Z_R) - logit_R)).sum(), d_logits_RV


def chunks(hidden_BTD: jax.Array, target_BT: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(hidden_NRD, target_NR) of N equal chunks, of at most so many rows; what is not predicted fills up the last."""
    number = max(1, -(-target_BT.size // rows))
    padding = -target_BT.size % number
    hidden_RD = jnp.pad(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), ((0, padding), (0, 0)))
    target_R = jnp.pad(target_BT.reshape(-1), (0, padding), constant_values=unpredicted(0))
    return hidden_RD.reshape(number, -1, hidden_RD.shape[-1]), target_R.reshape(number, -1)
