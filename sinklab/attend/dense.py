"""The definition of attention, through the whole matrix."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sinklab.attend.normalizer import Row, to_power
from sinklab.attend.operation import Operation
from sinklab.attend.rule import Rule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What makes a row's weights from its scores: A_ij = weight(s_ij - shift_i, exp(-shift_i)) / z_i."""

    shift_BHT: jax.Array  # 0 for similarities that are not shifted
    z_BHT: jax.Array  # over the gain
    mass_BHT: jax.Array  # sum_j |A_ij|


class Attended(NamedTuple):
    """What every backend gives."""

    output_BTHK: jax.Array  # in the values' dtype
    rows: Rows  # without a gradient
    attention_BHTS: jax.Array | None = None  # in float32; of the definition alone


def attend(query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, rule: Rule) -> Attended:
    """o_i = sum_j A_ij v_j, A_ij = gain * weight(s_ij) / Z(sum_j mass(s_ij)).

    s_ij = scale * <q_i, k_j> + b_ij + offset, and no scale is 1 / sqrt(K). G key heads serve H / G query heads each.
    """
    keys = key_BSGK.shape[1] - rule.columns
    arrays = rule.score_bias(keys), rule.visible(keys)
    return attend_by_matrices(query_BTHK, key_BSGK, value_BSGK, *arrays, rule.operation, rule.columns)


def attend_by_matrices(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    bias_BHTS: jax.Array | float,
    visible_BHTS: jax.Array,
    operation: Operation,
    columns: int = 0,
) -> Attended:
    """Compute attention with an array of biases and one of visible keys; any axis of either may be 1."""
    key_BSHK, value_BSHK = (per_query_head(array, query_BTHK.shape[2]) for array in (key_BSGK, value_BSGK))
    score_BHTS = scores(query_BTHK, key_BSHK, operation.scale) + bias_BHTS
    attention_BHTS, rows = weights(score_BHTS, visible_BHTS, operation, columns)
    # Asked for BTHK, einsum has the factors change sides, and XLA:CPU takes longer for each head.
    output_BHTK = jnp.einsum('BHTS,BSHK->BHTK', attention_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return Attended(jnp.swapaxes(output_BHTK, 1, 2), jax.lax.stop_gradient(rows), attention_BHTS)


def scores(query_BTHK: jax.Array, key_BSHK: jax.Array, scale: float | jax.Array | None = None) -> jax.Array:
    """Return scale * <q_i, k_j> as score_BHTS, in float32; the scale is 1 / sqrt(K) if it is None."""
    product_BHTS = jnp.einsum('BTHK,BSHK->BHTS', query_BTHK, key_BSHK, preferred_element_type=jnp.float32)
    return (query_BTHK.shape[-1] ** -0.5 if scale is None else scale) * product_BHTS


def per_query_head(array_BSGK: jax.Array, heads: int) -> jax.Array:
    """Each of the G key heads once for every query head that it serves."""
    groups = array_BSGK.shape[2]
    return array_BSGK if groups == heads else jnp.repeat(array_BSGK, heads // groups, 2)


def weights(
    score_BHTS: jax.Array, visible_BHTS: jax.Array, operation: Operation, columns: int = 0
) -> tuple[jax.Array, Rows]:
    """(attention_BHTS, what made it)."""
    similarity = operation.similarity
    largest = jnp.zeros((*score_BHTS.shape[:-1], 1))
    if similarity.shifted:
        least = 0.0 if operation.uses_unit else -jnp.inf
        largest = jnp.max(score_BHTS, -1, keepdims=True, where=visible_BHTS, initial=least)
        largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0.0, largest))
    unit = jnp.exp(-largest)
    # Hidden scores are set to 0 before they are weighed: the exponential of one that was never part of the
    # maximum could overflow, and 0 * inf would reach the gradient.
    weight, mass = similarity.weigh(jnp.where(visible_BHTS, score_BHTS - largest, 0.0), unit)
    total, scale = power_sum(mass, visible_BHTS, operation.power)
    seen = jnp.sum(visible_BHTS[..., columns:], -1, keepdims=True)
    z = scale * operation.normalizer.close(Row(total, seen, unit, operation.power)) / operation.gain
    attention_BHTS = jnp.where(visible_BHTS, weight, 0.0) / z
    return attention_BHTS, Rows(largest[..., 0], z[..., 0], jnp.abs(attention_BHTS).sum(-1))


def power_sum(mass: jax.Array, visible: jax.Array, power: float | None) -> tuple[jax.Array, jax.Array | float]:
    """(sum of (mass / scale)^power, scale): powers of masses over their largest, or whole rows would underflow."""
    if power is None:
        return jnp.sum(mass, -1, keepdims=True, where=visible), 1.0
    largest = jax.lax.stop_gradient(jnp.max(mass, -1, keepdims=True, where=visible, initial=0.0))
    scale = jnp.where(largest > 0, largest, 1.0)
    return jnp.sum(to_power(mass / scale, power), -1, keepdims=True, where=visible), scale
