"""Attention sinks (Gu et al., ICLR 2025, section 3), by the decisions of docs/measuring.md.

Attention is of T queries and columns + T keys: the columns, if there are any, stand left of the text, and its first
token is column number `columns`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

EPSILON = 1e-8  # of the released code
THRESHOLD = 0.3  # of the paper: a head whose alpha is above it has a sink
IMPLICIT = ('plus_one',)  # normalizers that are softmax with a column whose key and value are zero


def mass(attention_TS):
    """Raw row sums _T: 1 under a normalizer `sum`; what a proxy hides."""
    return jnp.abs(attention_TS).sum(-1)


def proxy(attention_TS):
    """|A_ij| / sum_j |A_ij|: rows that sum to 1, for operations whose rows do not; itself for those that do."""
    return jnp.abs(attention_TS) / (mass(attention_TS)[..., None] + EPSILON)


def completed(attention_TS, gain: float = 1.0):
    """With the implicit column, left of all others: what the rows lack of a sum of `gain`."""
    column_T1 = jnp.maximum(gain - attention_TS.sum(-1, keepdims=True), 0)
    return jnp.concatenate([column_T1, attention_TS], -1)


def importance(attention_TS, keys: int, columns: int = 0, prefix: int = 1):
    """alpha_k = sum_i A_ik / (queries that may see k) for the tokens k = 1..keys, so never above 1."""
    received_K = attention_TS[..., columns : columns + keys].sum(-2)
    return received_K / seen_by(attention_TS.shape[-2], keys, prefix)


def seen_by(length: int, keys: int, prefix: int = 1):
    """How many of T queries may see the tokens 1..keys: T - k + 1, or T within a prefix."""
    place_K = np.arange(keys)
    return length - np.where(place_K < prefix, 0, place_K)


def star(attention_TS, columns: int):
    """alpha_* of each column: its mean over the T queries of the text."""
    return attention_TS[..., :columns].mean(-2)


def with_own_query(alpha, length: int):
    """alpha_* as released: over T + 1 queries, the first of which is the column's own and sees itself alone."""
    return (1 + length * alpha) / (length + 1)


def within(attention_TS, reach: int, columns: int = 0):
    """alpha_1 over the queries 1..reach, where a window or block hides it from the others."""
    return attention_TS[..., :reach, columns].mean(-1)


def edge(attention_TS, window: int, columns: int = 0):
    """Mean of A_i,i-w+1 over the queries i > w: what the first key of a window gets, wherever that is."""
    query_T = np.arange(window, attention_TS.shape[-2])
    return attention_TS[..., query_T, columns + query_T - window + 1].mean(-1)


def rate(alpha, threshold: float = THRESHOLD) -> float:
    """Sink_k in percent: how often alpha_k is above (strictly) a threshold over sequences, layers and heads."""
    return 100 * float(np.mean(np.asarray(alpha) > threshold))


def floor(length: int, columns: int = 0, prefix: int = 1, reach: int | None = None) -> float:
    """alpha_1 of uniform attention: the harmonic number of T, over T (0.0741 at T = 64), where that is causal.

    The i-th query sees max(i, prefix) tokens and the columns; those after the `reach` first ones do not see token 1.
    """
    seen_T = np.maximum(np.arange(1, length + 1), prefix) + columns
    return float(np.sum(1 / seen_T[:reach]) / length)


def numbers(alpha_LPHK, mass_LPH, uniform: float, thresholds=(0.2, 0.4, 0.5)) -> dict[str, float]:
    """sink/k and alpha/k for every key given, Sink_1 at other thresholds, alpha_1's floor, the mean row mass."""
    keys = range(alpha_LPHK.shape[-1])
    return {
        **{f'sink/{k + 1}': rate(alpha_LPHK[..., k]) for k in keys},
        **{f'sink/1@{threshold}': rate(alpha_LPHK[..., 0], threshold) for threshold in thresholds},
        **{f'alpha/{k + 1}': float(np.mean(alpha_LPHK[..., k])) for k in keys},
        'alpha/floor': uniform,
        'mass/row': float(np.mean(mass_LPH)),
    }


def named(name: str, alpha) -> dict[str, float]:
    """The rate and the mean of one importance: sink/NAME and alpha/NAME."""
    return {f'sink/{name}': rate(alpha), f'alpha/{name}': float(np.mean(alpha))}


def star_numbers(star_LPHC, length: int) -> dict[str, float]:
    """sink/star as released, sink/star/clean over the text alone, of the strongest column."""
    strongest_LPH = np.asarray(star_LPHC).max(-1)
    return named('star', with_own_query(strongest_LPH, length)) | named('star/clean', strongest_LPH)


def prefix_numbers(alpha_LPHK) -> dict[str, float]:
    """sink/prefix: how often max_k alpha_k is above the threshold; argmax/k: how often alpha_k is that maximum.

    Both in percent, of each sequence, layer and head; argmax/k has no threshold, it counts heads without a sink too.
    """
    tokens = np.shape(alpha_LPHK)[-1]
    largest = np.argmax(alpha_LPHK, -1)
    return {
        'sink/prefix': rate(np.max(alpha_LPHK, -1)),
        **{f'argmax/{k + 1}': 100 * float(np.mean(largest == k)) for k in range(tokens)},
    }


def completed_sums(received, gain: float, length: int):
    """What `completed` would have received of a training batch, over so many queries."""
    lacked_BH1 = length * (gain - received.mass_BH)[..., None]
    raw_BHS = jnp.concatenate([lacked_BH1, received.raw_BHS], -1)
    return dataclasses.replace(
        received,
        raw_BHS=raw_BHS,
        share_BHS=raw_BHS / gain,
        mass_BH=jnp.full_like(received.mass_BH, gain),
        columns=received.columns + 1,
    )


def context(received, length: int, prefix: int = 1, reach: int | None = None) -> dict:
    """Rates and means over the whole context of a training batch, from what its first keys have received.

    sink/k/context and alpha/k/context by proxy, of alpha_1 raw too, of the strongest column over the text, the floor
    of alpha_1 at this length, and the mean row mass.
    """
    columns = received.columns
    share_K, raw_K = (sums[..., columns:] for sums in (received.share_BHS, received.raw_BHS))
    seen_K = seen_by(length, share_K.shape[-1], prefix)
    alpha_K, raw_1 = share_K / seen_K, raw_K[..., :1] / seen_K[:1]
    found = {f'{k + 1}/context': alpha_K[..., k] for k in range(alpha_K.shape[-1])}
    found |= {'1/raw/context': raw_1[..., 0]}
    if columns:
        found |= {'star/clean/context': received.share_BHS[..., :columns].max(-1) / length}
    rates = {f'sink/{name}': 100 * jnp.mean(alpha > THRESHOLD) for name, alpha in found.items()}
    means = {f'alpha/{name}': jnp.mean(alpha) for name, alpha in found.items()}
    uniform = jnp.float32(floor(length, columns, prefix, reach))
    return rates | means | {'alpha/floor/context': uniform, 'mass/row/context': jnp.mean(received.mass_BH)}
