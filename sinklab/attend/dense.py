"""The definition of attention, through the whole matrix."""

import jax
import jax.numpy as jnp

from sinklab import spec
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS, Row
from sinklab.attend.similarity import SIMILARITIES


def attend(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    attention: spec.Attention,
    mask: Mask,
    *,
    columns: int = 0,
    bias_BHTS: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """o_i = sum_j A_ij v_j, A_ij = gain * weight(s_ij) / Z(sum_j mass(s_ij)), s_ij = <q_i, k_j> / sqrt(K) + bias_ij.

    Every query sees the first `columns` keys, and the others through the mask, whose first key is number `columns`.
    A bias may be 1 along any axis. Returns (output_BTHK in the values' dtype, attention_BHTS in float32).
    """
    scale = query_BTHK.shape[-1] ** -0.5
    score_BHTS = scale * jnp.einsum('BTHK,BSHK->BHTS', query_BTHK, key_BSHK, preferred_element_type=jnp.float32)
    visible_BTS = jnp.pad(
        mask.visible(key_BSHK.shape[1] - columns), ((0, 0), (0, 0), (columns, 0)), constant_values=True
    )
    attention_BHTS = weights(score_BHTS + bias_BHTS, visible_BTS[:, None], attention, columns)
    output_BTHK = jnp.einsum('BHTS,BSHK->BTHK', attention_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return output_BTHK, attention_BHTS


def weights(score_BHTS: jax.Array, visible_BHTS: jax.Array, attention: spec.Attention, columns: int = 0) -> jax.Array:
    similarity, normalizer = SIMILARITIES[attention.similarity], NORMALIZERS[attention.normalizer]
    largest = 0.0
    if similarity.shifted:
        least = 0.0 if similarity.uses_unit or normalizer.uses_unit else -jnp.inf
        largest = jnp.max(score_BHTS, -1, keepdims=True, where=visible_BHTS, initial=least)
        largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0.0, largest))
    unit = jnp.exp(-jnp.float32(largest))
    # Hidden scores are set to 0 before they are weighed: the exponential of one that was never part of the
    # maximum could overflow, and 0 * inf would reach the gradient.
    weight, mass = similarity.weigh(jnp.where(visible_BHTS, score_BHTS - largest, 0.0), unit)
    total, scale = summed(mass, visible_BHTS, attention.power)
    seen = jnp.sum(visible_BHTS[..., columns:], -1, keepdims=True)
    z = scale * normalizer.close(Row(total, seen, unit, attention.power))
    return attention.gain * jnp.where(visible_BHTS, weight, 0.0) / z


def summed(mass: jax.Array, visible: jax.Array, power: float | None) -> tuple[jax.Array, jax.Array | float]:
    """(sum of (mass / scale)^power, scale): powers of masses over their largest, or whole rows would underflow."""
    if power is None:
        return jnp.sum(mass, -1, keepdims=True, where=visible), 1.0
    largest = jax.lax.stop_gradient(jnp.max(mass, -1, keepdims=True, where=visible, initial=0.0))
    scale = jnp.where(largest > 0, largest, 1.0)
    share = mass / scale
    raised = jnp.where(share > 0, jnp.where(share > 0, share, 1.0) ** power, 0.0)  # 0^p has no finite gradient
    return jnp.sum(raised, -1, keepdims=True, where=visible), scale
