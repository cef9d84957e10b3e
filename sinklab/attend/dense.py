"""The definition of attention, through the whole matrix."""

import jax
import jax.numpy as jnp

from sinklab import spec
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS
from sinklab.attend.similarity import SIMILARITIES


def attend(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    attention: spec.Attention,
    mask: Mask,
) -> tuple[jax.Array, jax.Array]:
    """o_i = sum_j A_ij v_j with A_ij = weight(s_ij) / Z(sum_j mass(s_ij)), s_ij = <q_i, k_j> / sqrt(K).

    Returns (output_BTHK in the values' dtype, attention_BHTS in float32).
    """
    scale = query_BTHK.shape[-1] ** -0.5
    score_BHTS = scale * jnp.einsum('BTHK,BSHK->BHTS', query_BTHK, key_BSHK, preferred_element_type=jnp.float32)
    visible_TS = mask.visible(key_BSHK.shape[1])
    attention_BHTS = weights(score_BHTS, visible_TS, attention)
    output_BTHK = jnp.einsum('BHTS,BSHK->BTHK', attention_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return output_BTHK, attention_BHTS


def weights(score_BHTS: jax.Array, visible_TS: jax.Array, attention: spec.Attention) -> jax.Array:
    similarity = SIMILARITIES[attention.similarity]
    if similarity.shifted:
        largest = jnp.max(score_BHTS, -1, keepdims=True, where=visible_TS, initial=-jnp.inf)
        score_BHTS -= jax.lax.stop_gradient(jnp.nan_to_num(largest))
    # Hidden scores are set to 0 before they are weighed: the exponential of one that was never part of the
    # maximum could overflow, and 0 * inf would reach the gradient.
    weight, mass = similarity.weigh(jnp.where(visible_TS, score_BHTS, 0.0))
    total = jnp.sum(mass, -1, keepdims=True, where=visible_TS)
    return jnp.where(visible_TS, weight, 0.0) / NORMALIZERS[attention.normalizer](total)
