"""Attention to the first keys, without the full attention matrix."""

import dataclasses

import jax
import jax.numpy as jnp

from sinklab.attn import reference
from sinklab.attn.operations import EPSILON
from sinklab.attn.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyAttentionSums:
    """Sums over queries of A_ij and of |A_ij| / sum_j |A_ij|, and the mean of sum_j |A_ij|."""

    raw_BHS: jax.Array  # S: learned keys, then the first keys of the text
    share_BHS: jax.Array
    abs_weight_sum_BH: jax.Array


def compute_key_attention_sums(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    row_stats: reference.RowStats,
    spec: AttentionSpec,
    num_keys: int,
    first_query: int = 0,
) -> KeyAttentionSums:
    """Compute the attention to learned keys and the first `num_keys` text keys, from query `first_query` on."""
    attention_BHTS = recompute_weights(query_BTHK, key_BSGK, row_stats.shift_BHT, row_stats.z_BHT, spec, num_keys)[
        :, :, first_query:
    ]
    abs_weight_sum_BHT = jax.lax.stop_gradient(row_stats.abs_weight_sum_BHT)[:, :, first_query:]
    share_BHTS = jnp.abs(attention_BHTS) / (abs_weight_sum_BHT[..., None] + EPSILON)
    return KeyAttentionSums(attention_BHTS.sum(2), share_BHTS.sum(2), abs_weight_sum_BHT.mean(-1))


def recompute_weights(query_BTHK, key_BSGK, shift_BHT, z_BHT, spec: AttentionSpec, num_keys: int) -> jax.Array:
    """Recompute attention_BHTS to learned keys and the first `num_keys` keys, from row statistics."""
    inputs = query_BTHK, key_BSGK[:, : spec.num_learned_kv + num_keys], shift_BHT[..., None], z_BHT[..., None]
    query_BTHK, key_BSGK, shift_BHT1, z_BHT1 = jax.lax.stop_gradient(inputs)
    bias_BHTS = jax.lax.stop_gradient(spec.slice_text(0, num_keys).materialize_bias(num_keys))
    key_BSHK = reference.repeat_kv(key_BSGK, query_BTHK.shape[2])
    score_BHTS = reference.compute_scores(query_BTHK, key_BSHK, spec.operation.scale) + bias_BHTS
    visible_B1TS = spec.materialize_mask(num_keys)
    score_BHTS = jnp.where(visible_B1TS, score_BHTS - shift_BHT1, 0.0)
    weight_BHTS = spec.operation.similarity.weigh(score_BHTS, jnp.exp(-shift_BHT1))[0]
    return spec.operation.clip(jnp.where(visible_B1TS, weight_BHTS, 0.0) / z_BHT1)
