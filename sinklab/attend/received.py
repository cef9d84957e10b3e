"""What is measured of attention without its matrix, from what is known of every row; no gradient."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from sinklab.attend import chunked, dense
from sinklab.attend.normalizer import EPSILON
from sinklab.attend.rule import Rule

Values = Mapping[str, Callable[[jax.Array], jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """Sums over queries of A_ij and of |A_ij| / sum_j |A_ij|, and the mean of the mass sum_j |A_ij|."""

    raw_BHS: jax.Array  # columns, then keys
    share_BHS: jax.Array
    mass_BH: jax.Array


def of_first_keys(
    query_BTHK: jax.Array, key_BSGK: jax.Array, rows: dense.Rows, rule: Rule, keys: int, first: int = 0
) -> Received:
    """What the columns and the first `keys` keys of the text get from the queries from number `first` on."""
    attention_BHTS = again(query_BTHK, key_BSGK, rows.shift_BHT, rows.z_BHT, rule, keys)[:, :, first:]
    mass_BHT = jax.lax.stop_gradient(rows.mass_BHT)[:, :, first:]
    share_BHTS = jnp.abs(attention_BHTS) / (mass_BHT[..., None] + EPSILON)
    return Received(attention_BHTS.sum(2), share_BHTS.sum(2), mass_BHT.mean(-1))


def row_means(
    query_BTHK: jax.Array, key_BSGK: jax.Array, rows: dense.Rows, rule: Rule, values: Values, first: int = 0
) -> dict[str, jax.Array]:
    """The mean of each value, attention_BHTS -> value_BHT, over the rows of the queries from number `first` on, _BH.

    O(T^2 K) work, a chunk of the matrix after another.
    """
    keys = key_BSGK.shape[1] - rule.columns

    def of_chunk(chunk):
        query, *edges, shift_BHT, z_BHT = chunk
        attention_BHTS = again(query, key_BSGK, shift_BHT, z_BHT, chunked.chunk_rule(rule, *edges, keys), keys)
        return {name: value(attention_BHTS) for name, value in values.items()}

    queries = chunked.in_chunks(query_BTHK, rule, [rows.shift_BHT, rows.z_BHT])
    found = jax.lax.map(of_chunk, jax.lax.stop_gradient(queries))
    length = query_BTHK.shape[1]
    return {name: chunked.join(value, 2, length)[:, :, first:].mean(-1) for name, value in found.items()}


def again(query_BTHK, key_BSGK, shift_BHT, z_BHT, rule: Rule, keys: int) -> jax.Array:
    """attention_BHTS of the columns and the first `keys` keys, by what makes the rows' weights."""
    given = query_BTHK, key_BSGK[:, : rule.columns + keys], shift_BHT[..., None], z_BHT[..., None]
    query_BTHK, key_BSGK, shift_BHT1, z_BHT1 = jax.lax.stop_gradient(given)
    bias_BHTS = jax.lax.stop_gradient(rule.cut(0, keys).score_bias(keys))
    key_BSHK = dense.per_query_head(key_BSGK, query_BTHK.shape[2])
    score_BHTS = dense.scores(query_BTHK, key_BSHK, rule.operation.scale) + bias_BHTS
    visible_B1TS = rule.visible(keys)
    score_BHTS = jnp.where(visible_B1TS, score_BHTS - shift_BHT1, 0.0)
    weight_BHTS = rule.operation.similarity.weigh(score_BHTS, jnp.exp(-shift_BHT1))[0]
    return jnp.where(visible_B1TS, weight_BHTS, 0.0) / z_BHT1
