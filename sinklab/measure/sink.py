"""Attention sinks (Gu et al., ICLR 2025, section 3), by the decisions of docs/measuring.md.

Attention is of T queries and columns + T keys: the columns, if there are any, stand left of the text, and its first
token is key number `columns`.
"""

from typing import Any

import numpy as np

from sinklab.measure.measure import Arrays, Measure, Number, Picture, of_heads, of_rows
from sinklab.measure.setting import Setting

EPSILON = 1e-8  # of the released code
THRESHOLD = 0.3  # of the paper: a head whose alpha is above it has a sink
THRESHOLDS = (0.2, 0.4, 0.5)  # that Sink_1 is also reported at


def mass(attention_TS):
    """Raw row sums _T: 1 under a normalizer `sum`; what a proxy hides."""
    return abs(attention_TS).sum(-1)


def proxy(attention_TS):
    """|A_ij| / sum_j |A_ij|: rows that sum to 1, for operations whose rows do not; itself for those that do."""
    return abs(attention_TS) / (mass(attention_TS)[..., None] + EPSILON)


def importance(attention_TS, keys: int, columns: int = 0, prefix: int = 0):
    """alpha_k = sum_i A_ik / (queries that may see k) for the tokens k = 1..keys, so never above 1."""
    received_J = attention_TS[..., columns : columns + keys].sum(-2)
    return received_J / queries(attention_TS.shape[-2], keys, prefix)


def queries(length: int, keys: int, prefix: int = 0):
    """How many of T queries may see the tokens 1..keys: T - k + 1, or T within a prefix."""
    place_J = np.arange(keys)
    return length - np.where(place_J < prefix, 0, place_J)


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


def rate_and_mean(name: str, alpha) -> dict[str, float]:
    """Of one importance: sink/NAME and alpha/NAME."""
    return {f'sink/{name}': rate(alpha), f'alpha/{name}': float(np.mean(alpha))}


def floor(length: int, columns: int = 0, prefix: int = 0, reach: int | None = None) -> float:
    """alpha_1 of uniform attention: the harmonic number of T, over T (0.0741 at T = 64), where that is causal.

    The i-th query sees max(i, prefix) tokens and the columns; those after the `reach` first ones do not see token 1.
    """
    seen_T = np.maximum(np.arange(1, length + 1), prefix) + columns
    return float(np.sum(1 / seen_T[:reach]) / length)


def uniform(setting: Setting) -> float:
    return floor(setting.length, setting.columns, setting.prefix, setting.reach)


def numbers(alpha_LPHJ, uniform: float) -> dict[str, float]:
    """sink/k and alpha/k for every token given, Sink_1 at other thresholds, alpha_1's floor."""
    of_tokens = {}
    for k in range(alpha_LPHJ.shape[-1]):
        of_tokens |= rate_and_mean(str(k + 1), alpha_LPHJ[..., k])
    others = {f'sink/1@{threshold}': rate(alpha_LPHJ[..., 0], threshold) for threshold in THRESHOLDS}
    return of_tokens | others | {'alpha/floor': uniform}


def star_numbers(star_LPH, length: int) -> dict[str, float]:
    """sink/star as released, sink/star/clean over the text alone, of the strongest column."""
    return rate_and_mean('star', with_own_query(star_LPH, length)) | rate_and_mean('star/clean', star_LPH)


def prefix_numbers(alpha_LPHJ) -> dict[str, float]:
    """sink/prefix: how often max_k alpha_k is above the threshold; argmax/k: how often alpha_k is that maximum.

    Both in percent, of each sequence, layer and head; argmax/k has no threshold, it counts heads without a sink too.
    """
    tokens = np.shape(alpha_LPHJ)[-1]
    largest = np.argmax(alpha_LPHJ, -1)
    return {
        'sink/prefix': rate(np.max(alpha_LPHJ, -1)),
        **{f'argmax/{k + 1}': 100 * float(np.mean(largest == k)) for k in range(tokens)},
    }


def context_of(name: str, alpha_BH) -> Arrays:
    return {f'sink/{name}': 100 * (alpha_BH > THRESHOLD).mean(), f'alpha/{name}': alpha_BH.mean()}


def context_of_tokens(received: Any, setting: Setting) -> Arrays:
    share_BHJ = received.share_BHS[..., setting.columns :]
    alpha_BHJ = share_BHJ / queries(setting.length, share_BHJ.shape[-1], setting.prefix)
    found = {'alpha/floor': np.float32(uniform(setting))}
    for k in range(alpha_BHJ.shape[-1]):
        found |= context_of(str(k + 1), alpha_BHJ[..., k])
    return found


def matrices(attention_LHTS: np.ndarray) -> np.ndarray:
    """Rows that sum to 1 again: half precision has rounded them."""
    return proxy(attention_LHTS.astype(np.float32))


def pair(name: str, sentence: str, in_sweep: bool = False, in_table: bool = False) -> tuple[Number, Number]:
    """The rate and the mean of an importance."""
    symbol = name.replace('star', '*')
    return (
        Number(f'sink/{name}', f'Sink_{symbol}', sentence, '%', 1, in_table=in_table, in_sweep=in_sweep),
        Number(f'alpha/{name}', f'alpha_{symbol}', sentence),
    )


MEASURES = (
    Measure(
        reads=('attention_LPHTS',),
        arrays=lambda attention, setting: dict(
            alpha_LPHJ=importance(proxy(attention), setting.keys, setting.columns, setting.prefix)
        ),
        numbers=lambda kept, setting: numbers(kept['alpha_LPHJ'], uniform(setting)),
        shown=(
            Number(
                'sink/1',
                'Sink_1',
                'The share of sequences, layers and heads whose alpha_1 is above 0.3, counted before any mean.',
                '%',
                digits=1,
                in_table=True,
                in_sweep=True,
            ),
            Number(
                'alpha/1',
                'alpha_1',
                'alpha_1, the mean attention of queries to the first token, by proxy.',
                in_table=True,
            ),
            Number(
                'alpha/floor',
                'uniform',
                'alpha_1 of uniform attention: 0.074 at T = 64 where that is causal.',
                in_table=True,
            ),
            *pair('{k}', 'The same of token k, over the queries that may see it.'),
            Number('sink/1@{k}', 'Sink_1 at {k}', 'Sink_1 at another threshold.', '%', digits=1),
        ),
        saved=('alpha_LPHJ',),
        picture=Picture(
            'heads',
            'heads',
            'alpha_LPHJ',
            'Where the sinks are',
            'alpha_1',
            'Mean alpha_1 of each layer and head.',
            values=lambda alpha_LPHJ: alpha_LPHJ[..., 0].mean(1),
            largest=1,
        ),
        context=context_of_tokens,
    ),
    of_heads(
        'star',
        lambda attention, setting: star(proxy(attention), setting.columns).max(-1),
        (
            *pair(
                'star',
                'Of the strongest column or sink token, over T + 1 queries with its own, as released.',
                True,
                True,
            ),
            *pair('star/clean', 'The same over the T queries of the text alone.'),
        ),
        numbers=lambda star_LPH, setting: star_numbers(star_LPH, setting.length),
        applies=lambda setting: setting.columns > 0,
        context=lambda received, setting: context_of(
            'star/clean', received.share_BHS[..., : setting.columns].max(-1) / setting.length
        ),
    ),
    of_heads(
        'raw',
        lambda attention, setting: importance(attention, 1, setting.columns)[..., 0],
        pair('1/raw', 'Of the first token, by A_ij itself instead of a proxy.'),
        numbers=lambda raw_LPH, setting: rate_and_mean('1/raw', raw_LPH),
        context=lambda received, setting: context_of(
            '1/raw', received.raw_BHS[..., setting.columns] / setting.length
        ),
    ),
    of_heads(
        'within',
        lambda attention, setting: within(proxy(attention), setting.reach, setting.columns),
        pair('1/window', 'Of the first token, over the queries that a window or block lets see it.', in_sweep=True),
        numbers=lambda within_LPH, setting: rate_and_mean('1/window', within_LPH),
        applies=lambda setting: setting.reach < setting.length,
    ),
    of_heads(
        'edge',
        lambda attention, setting: edge(proxy(attention), setting.window, setting.columns),
        pair('edge', "Of the first key in each query's window, wherever that is."),
        numbers=lambda edge_LPH, setting: rate_and_mean('edge', edge_LPH),
        applies=lambda setting: setting.window is not None,
    ),
    Measure(
        reads=(),
        arrays=lambda setting: {},
        numbers=lambda kept, setting: prefix_numbers(kept['alpha_LPHJ'][..., : setting.prefix]),
        shown=(
            Number(
                'sink/prefix',
                'Sink_prefix',
                'The share of sequences, layers and heads in which some token of a prefix has alpha_k above 0.3.',
                '%',
                digits=1,
                in_sweep=True,
            ),
            Number('argmax/{k}', 'argmax {k}', 'How often token k has the largest alpha of a prefix.', '%', digits=1),
        ),
        applies=lambda setting: setting.prefix > 0,
    ),
    of_rows(
        'mass',
        mass,
        (
            Number(
                'mass/row',
                'row mass',
                'The mean of sum_j |A_ij|, which a proxy hides: that of next to nothing is noise.',
                digits=2,
                in_table=True,
                in_sweep=True,
            ),
        ),
        context=lambda received, setting: {'mass/row': received.mass_BH.mean()},
    ),
    Measure(
        reads=('attention_LPHTS',),
        arrays=lambda attention, setting: dict(attention_LHTS=proxy(attention)[:, 0].astype(np.float16)),
        numbers=lambda kept, setting: {},
        saved=('attention_LHTS',),
        picture=Picture(
            'matrices',
            'attention',
            'attention_LHTS',
            'What attention looks like',
            'attention',
            'One held-out sequence, the heads of each run that give most to its first token; query down, key '
            'across, every row scaled to sum to 1.',
            values=matrices,
            largest=1,
        ),
    ),
)
