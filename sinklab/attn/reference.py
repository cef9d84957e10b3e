"""Reference attention: the definition, through the full matrix of weights."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sinklab.attn.operations import Operation, RowSums, raise_to_power
from sinklab.attn.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowStats:
    """Row statistics that turn scores into weights: A_ij = weight(s_ij - shift_i, exp(-shift_i)) / z_i."""

    shift_BHT: jax.Array  # 0 for similarities that are not shifted
    z_BHT: jax.Array  # Z / gain
    abs_weight_sum_BHT: jax.Array  # sum_j |A_ij|


class AttentionOutput(NamedTuple):
    """Output of an attention backend."""

    output_BTHK: jax.Array  # in the dtype of the values
    row_stats: RowStats  # without gradients
    attention_BHTS: jax.Array | None = None  # in float32; from the reference only


def attend(query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, spec: AttentionSpec) -> AttentionOutput:
    """Compute attention by its definition, through the full matrix of weights.

    o_i = sum_j A_ij v_j, with A_ij = gain * weight(s_ij) / Z(sum_l mass(s_il)) and the scores
    s_ij = scale * <q_i, k_j> + b_ij + offset. A scale of None is 1 / sqrt(K). Each of the G key heads serves H / G
    query heads.
    """
    num_keys = key_BSGK.shape[1] - spec.num_learned_kv
    arrays = spec.materialize_bias(num_keys), spec.materialize_mask(num_keys)
    return attend_with_matrices(query_BTHK, key_BSGK, value_BSGK, *arrays, spec.operation, spec.num_learned_kv)


def attend_with_matrices(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    bias_BHTS: jax.Array | float,
    visible_BHTS: jax.Array,
    operation: Operation,
    num_learned_kv: int = 0,
) -> AttentionOutput:
    """Compute attention with an array of biases and one of visible keys; any axis of either may be 1."""
    key_BSHK, value_BSHK = (repeat_kv(array, query_BTHK.shape[2]) for array in (key_BSGK, value_BSGK))
    score_BHTS = compute_scores(query_BTHK, key_BSHK, operation.scale) + bias_BHTS
    attention_BHTS, row_stats = compute_weights(score_BHTS, visible_BHTS, operation, num_learned_kv)
    output_BTHK = sum_values(attention_BHTS, value_BSHK)
    return AttentionOutput(output_BTHK, jax.lax.stop_gradient(row_stats), attention_BHTS)


def sum_values(attention_BHTS: jax.Array, value_BSHK: jax.Array) -> jax.Array:
    """Return output_BTHK, the sum of the values with these weights, in the dtype of the values."""
    # For an output of BTHK einsum would swap the factors, and XLA:CPU would take longer for each head.
    output_BHTK = jnp.einsum('BHTS,BSHK->BHTK', attention_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return jnp.swapaxes(output_BHTK, 1, 2)


def compute_scores(query_BTHK: jax.Array, key_BSHK: jax.Array, scale: float | jax.Array | None = None) -> jax.Array:
    """Return scale * <q_i, k_j> as score_BHTS, in float32; the scale is 1 / sqrt(K) if it is None."""
    product_BHTS = jnp.einsum('BTHK,BSHK->BHTS', query_BTHK, key_BSHK, preferred_element_type=jnp.float32)
    return (query_BTHK.shape[-1] ** -0.5 if scale is None else scale) * product_BHTS


def repeat_kv(array_BSGK: jax.Array, num_heads: int) -> jax.Array:
    """Repeat each of the G key heads num_heads / G times, once for every query head that it serves."""
    num_kv_heads = array_BSGK.shape[2]
    return array_BSGK if num_kv_heads == num_heads else jnp.repeat(array_BSGK, num_heads // num_kv_heads, 2)


def compute_weights(
    score_BHTS: jax.Array, visible_BHTS: jax.Array, operation: Operation, num_learned_kv: int = 0
) -> tuple[jax.Array, RowStats]:
    """Return attention_BHTS and its row statistics."""
    similarity = operation.similarity
    max_score = jnp.zeros((*score_BHTS.shape[:-1], 1))
    if similarity.is_shifted:
        lower_bound = 0.0 if operation.uses_unit else -jnp.inf
        max_score = jnp.max(score_BHTS, -1, keepdims=True, where=visible_BHTS, initial=lower_bound)
        max_score = jax.lax.stop_gradient(jnp.where(jnp.isneginf(max_score), 0.0, max_score))
    unit = jnp.exp(-max_score)
    # Hidden scores are set to 0 before they are weighed: they are not part of the maximum, so their exponential could
    # overflow, and 0 * inf would reach the gradient.
    weight, mass = similarity.weigh(jnp.where(visible_BHTS, score_BHTS - max_score, 0.0), unit)
    total, scale = sum_powers(mass, visible_BHTS, operation.power)
    num_visible = jnp.sum(visible_BHTS[..., num_learned_kv:], -1, keepdims=True)
    z = scale * operation.normalizer.compute_z(RowSums(total, num_visible, unit, operation.power)) / operation.gain
    attention_BHTS = operation.clip(jnp.where(visible_BHTS, weight, 0.0) / z)
    return attention_BHTS, RowStats(max_score[..., 0], z[..., 0], jnp.abs(attention_BHTS).sum(-1))


def sum_powers(mass: jax.Array, visible: jax.Array, power: float | None) -> tuple[jax.Array, jax.Array | float]:
    """Return (sum of (mass / scale)^power, scale).

    The scale is the largest visible mass of the row; without it the powers of whole rows could underflow.
    """
    if power is None:
        return jnp.sum(mass, -1, keepdims=True, where=visible), 1.0
    max_mass = jax.lax.stop_gradient(jnp.max(mass, -1, keepdims=True, where=visible, initial=0.0))
    scale = jnp.where(max_mass > 0, max_mass, 1.0)
    return jnp.sum(raise_to_power(mass / scale, power), -1, keepdims=True, where=visible), scale
