"""What the first keys receive, from what is known of every row: O(T J) work for J keys, and no gradient."""

import dataclasses

import jax
import jax.numpy as jnp

from sinklab.attend import dense
from sinklab.attend.normalizer import EPSILON
from sinklab.attend.rule import Rule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """Sums over queries of A_ij and of |A_ij| / sum_j |A_ij|, and the mean of the mass sum_j |A_ij|."""

    raw_BHS: jax.Array  # columns, then keys
    share_BHS: jax.Array
    mass_BH: jax.Array
    columns: int = dataclasses.field(metadata=dict(static=True))


def received(
    query_BTHK: jax.Array, key_BSGK: jax.Array, rows: dense.Rows, rule: Rule, keys: int, first: int = 0
) -> Received:
    """What the columns and the first `keys` keys of the text get from the queries from number `first` on."""
    columns, operation = rule.columns, rule.operation
    query_BTHK, key_BSGK, rows = jax.lax.stop_gradient((query_BTHK, key_BSGK[:, : columns + keys], rows))
    added_BHTS = jax.lax.stop_gradient(rule.cut(0, keys).added(keys))
    score_BHTS = dense.scores(query_BTHK, dense.grouped(key_BSGK, query_BTHK.shape[2])) + added_BHTS
    visible_B1TS = rule.visible(keys)
    shift_BHT1, z_BHT1, mass_BHT1 = (row[..., None] for row in (rows.shift_BHT, rows.z_BHT, rows.mass_BHT))
    score_BHTS = jnp.where(visible_B1TS, score_BHTS - shift_BHT1, 0.0)
    weight_BHTS = operation.similarity.weigh(score_BHTS, jnp.exp(-shift_BHT1))[0]
    attention_BHTS = (jnp.where(visible_B1TS, weight_BHTS, 0.0) / z_BHT1)[:, :, first:]
    share_BHTS = jnp.abs(attention_BHTS) / (mass_BHT1[:, :, first:] + EPSILON)
    mass_BH = rows.mass_BHT[:, :, first:].mean(-1)
    return Received(attention_BHTS.sum(2), share_BHTS.sum(2), mass_BH, columns)
