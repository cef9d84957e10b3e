"""The definition of attention, through the whole matrix."""

import dataclasses

import jax
import jax.numpy as jnp

from sinklab import spec
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS, Row, raised
from sinklab.attend.similarity import SIMILARITIES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What makes a row's weights from its scores: A_ij = weight(s_ij - shift_i, exp(-shift_i)) / z_i."""

    shift_BHT: jax.Array  # 0 for similarities that are not shifted
    z_BHT: jax.Array  # over the gain
    mass_BHT: jax.Array  # sum_j |A_ij|


def attend(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    attention: spec.Attention,
    mask: Mask,
    *,
    columns: int = 0,
    bias_BHTS: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """o_i = sum_j A_ij v_j, A_ij = gain * weight(s_ij) / Z(sum_j mass(s_ij)), s_ij = <q_i, k_j> / sqrt(K) + bias_ij.

    Every query sees the first `columns` keys, and the others through the mask, whose first key is number `columns`.
    A bias may be 1 along any axis. G key heads serve H / G query heads each.
    Returns (output_BTHK in the values' dtype, attention_BHTS in float32).
    """
    keys = key_BSGK.shape[1] - columns
    output_BTHK, attention_BHTS, _ = attended(
        query_BTHK, key_BSGK, value_BSGK, attention, mask.visible(keys), columns, bias_BHTS
    )
    return output_BTHK, attention_BHTS


def attended(query_BTHK, key_BSGK, value_BSGK, attention, visible_BTS, columns, bias_BHTS):
    """(output_BTHK, attention_BHTS, Rows), the mask being given as a matrix over the text."""
    key_BSHK, value_BSHK = (grouped(array, query_BTHK.shape[2]) for array in (key_BSGK, value_BSGK))
    score_BHTS = scores(query_BTHK, key_BSHK) + bias_BHTS
    visible_BHTS = jnp.pad(visible_BTS, ((0, 0), (0, 0), (columns, 0)), constant_values=True)[:, None]
    attention_BHTS, rows = weights(score_BHTS, visible_BHTS, attention, columns)
    output_BTHK = jnp.einsum('BHTS,BSHK->BTHK', attention_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return output_BTHK, attention_BHTS, rows


def scores(query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
    """<q_i, k_j> / sqrt(K) as score_BHTS, in float32."""
    product_BHTS = jnp.einsum('BTHK,BSHK->BHTS', query_BTHK, key_BSHK, preferred_element_type=jnp.float32)
    return query_BTHK.shape[-1] ** -0.5 * product_BHTS


def grouped(array_BSGK: jax.Array, heads: int) -> jax.Array:
    """Each of the G key heads once for every query head that it serves."""
    groups = array_BSGK.shape[2]
    return array_BSGK if groups == heads else jnp.repeat(array_BSGK, heads // groups, 2)


def weights(
    score_BHTS: jax.Array, visible_BHTS: jax.Array, attention: spec.Attention, columns: int = 0
) -> tuple[jax.Array, Rows]:
    """(attention_BHTS, what made it)."""
    similarity, normalizer = SIMILARITIES[attention.similarity], NORMALIZERS[attention.normalizer]
    largest = jnp.zeros((*score_BHTS.shape[:-1], 1))
    if similarity.shifted:
        least = 0.0 if similarity.uses_unit or normalizer.uses_unit else -jnp.inf
        largest = jnp.max(score_BHTS, -1, keepdims=True, where=visible_BHTS, initial=least)
        largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0.0, largest))
    unit = jnp.exp(-largest)
    # Hidden scores are set to 0 before they are weighed: the exponential of one that was never part of the
    # maximum could overflow, and 0 * inf would reach the gradient.
    weight, mass = similarity.weigh(jnp.where(visible_BHTS, score_BHTS - largest, 0.0), unit)
    total, scale = summed(mass, visible_BHTS, attention.power)
    seen = jnp.sum(visible_BHTS[..., columns:], -1, keepdims=True)
    z = scale * normalizer.close(Row(total, seen, unit, attention.power)) / attention.gain
    attention_BHTS = jnp.where(visible_BHTS, weight, 0.0) / z
    return attention_BHTS, Rows(largest[..., 0], z[..., 0], jnp.abs(attention_BHTS).sum(-1))


def summed(mass: jax.Array, visible: jax.Array, power: float | None) -> tuple[jax.Array, jax.Array | float]:
    """(sum of (mass / scale)^power, scale): powers of masses over their largest, or whole rows would underflow."""
    if power is None:
        return jnp.sum(mass, -1, keepdims=True, where=visible), 1.0
    largest = jax.lax.stop_gradient(jnp.max(mass, -1, keepdims=True, where=visible, initial=0.0))
    scale = jnp.where(largest > 0, largest, 1.0)
    return jnp.sum(raised(mass / scale, power), -1, keepdims=True, where=visible), scale
