"""Attention sinks (Gu et al., ICLR 2025, section 3), by the decisions of docs/paper/decisions.md.

Attention is of T queries and columns + T keys: the columns, if there are any, stand left of the text, and its first
token is key number `columns`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sinklab.measure.measure import Arrays, Measure, Number, Picture, of_heads, of_rows, union
from sinklab.measure.setting import Setting

EPSILON = 1e-8  # of the released code
THRESHOLD = 0.3  # of the paper: a head whose alpha is above it has a sink
COLUMN = 'The column (attention bias or sink token) with the most attention takes the place of token 1'
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
    others = {f'sink/1@{threshold}': rate(alpha_LPHJ[..., 0], threshold) for threshold in THRESHOLDS}
    tokens = (rate_and_mean(str(k + 1), alpha_LPHJ[..., k]) for k in range(alpha_LPHJ.shape[-1]))
    return union(tokens) | others | {'alpha/floor': uniform}


def prefix_numbers(alpha_LPHJ) -> dict[str, float]:
    """sink/prefix: how often max_k alpha_k is above the threshold; argmax/k: how often alpha_k is that maximum.

    Both in percent, of each sequence, layer and head; argmax/k has no threshold, it counts heads without a sink too.
    """
    largest = np.argmax(alpha_LPHJ, -1)
    often = {f'argmax/{k + 1}': 100 * float(np.mean(largest == k)) for k in range(np.shape(alpha_LPHJ)[-1])}
    return {'sink/prefix': rate(np.max(alpha_LPHJ, -1))} | often


def context(name: str, alpha_BH) -> Arrays:
    """rate_and_mean over a training batch, traced."""
    return {f'sink/{name}': 100 * (alpha_BH > THRESHOLD).mean(), f'alpha/{name}': alpha_BH.mean()}


def context_of_tokens(received: Any, setting: Setting) -> Arrays:
    share_BHJ = received.share_BHS[..., setting.columns :]
    alpha_BHJ = share_BHJ / queries(setting.length, share_BHJ.shape[-1], setting.prefix)
    tokens = (context(str(k + 1), alpha_BHJ[..., k]) for k in range(alpha_BHJ.shape[-1]))
    return union(tokens) | {'alpha/floor': np.float32(uniform(setting))}


def pair(name: str, sentence: str, **how: bool) -> tuple[Number, Number]:
    """The rate and the mean of an importance, for people."""
    symbol = name.replace('star', '*')
    return (
        Number(f'sink/{name}', f'Sink_{symbol}', sentence, '%', 1, **how),
        Number(f'alpha/{name}', f'alpha_{symbol}', sentence),
    )


def of_importance(kept: str, name: str, sentence: str, value: Callable, sweep: bool = False, **more: Any) -> Measure:
    """The rate and the mean of one importance of each sequence, layer and head."""
    shown = pair(name, sentence, sweep=sweep)
    return of_heads(kept, value, shown, numbers=lambda alpha_LPH, _: rate_and_mean(name, alpha_LPH), **more)


MEASURES = (
    Measure(
        reads=('attention_LPHTS',),
        arrays=lambda attention, setting: {
            'alpha_LPHJ': importance(proxy(attention), setting.keys, setting.columns, setting.prefix)
        },
        numbers=lambda kept, setting: numbers(kept['alpha_LPHJ'], uniform(setting)),
        shown=(
            Number(
                'sink/1',
                'Sink_1',
                'Share of (text, layer, head) with an alpha_1 above 0.3.',
                '%',
                1,
                table=True,
                sweep=True,
            ),
            Number('alpha/1', 'alpha_1', 'Mean attention that queries pay to the first token.', table=True),
            Number('alpha/floor', 'uniform', 'What alpha_1 would be if attention were uniform.', table=True),
            *pair('{k}', 'Token k takes the place of token 1, over the queries that may see it.'),
            Number('sink/1@{k}', 'Sink_1 at {k}', 'Sink_1 at the threshold k instead of 0.3.', '%', 1),
        ),
        saved=('alpha_LPHJ',),
        picture=Picture(
            'heads', 'alpha_LPHJ', 'Where the sinks are', 'alpha_1', of=lambda alpha: alpha[..., 0].mean(1), largest=1
        ),
        context=context_of_tokens,
    ),
    of_heads(
        'star',
        lambda attention, setting: star(proxy(attention), setting.columns).max(-1),
        (
            *pair('star', f'{COLUMN}; its own query counts.', table=True, sweep=True),
            *pair('star/clean', f'{COLUMN}; its own query does not count.'),
        ),
        numbers=lambda star_LPH, setting: (
            rate_and_mean('star', with_own_query(star_LPH, setting.length)) | rate_and_mean('star/clean', star_LPH)
        ),
        applies=lambda setting: setting.columns > 0,
        context=lambda received, setting: context(
            'star/clean', received.share_BHS[..., : setting.columns].max(-1) / setting.length
        ),
    ),
    of_importance(
        'raw',
        '1/raw',
        'A_ij itself is used instead of the proxy |A_ij| / sum_j |A_ij|.',
        lambda attention, setting: importance(attention, 1, setting.columns)[..., 0],
        context=lambda received, setting: context('1/raw', received.raw_BHS[..., setting.columns] / setting.length),
    ),
    of_importance(
        'within',
        '1/window',
        'Only the queries count whose window or block contains the first token.',
        lambda attention, setting: within(proxy(attention), setting.reach, setting.columns),
        sweep=True,
        applies=lambda setting: setting.reach < setting.length,
    ),
    of_importance(
        'edge',
        'edge',
        "The first key of each query's window takes the place of token 1.",
        lambda attention, setting: edge(proxy(attention), setting.window, setting.columns),
        applies=lambda setting: setting.window is not None,
    ),
    Measure(
        numbers=lambda kept, setting: prefix_numbers(kept['alpha_LPHJ'][..., : setting.prefix]),
        shown=(
            Number(
                'sink/prefix',
                'Sink_prefix',
                'Share of (text, layer, head) in which a token of the prefix has an alpha above 0.3.',
                '%',
                1,
                sweep=True,
            ),
            Number(
                'argmax/{k}',
                'argmax {k}',
                'Share of (text, layer, head) in which token k has the largest alpha of the prefix.',
                '%',
                1,
            ),
        ),
        applies=lambda setting: setting.prefix > 0,
    ),
    of_rows(
        'mass',
        mass,
        Number(
            'mass/row',
            'row mass',
            'Mean of sum_j |A_ij|, the sum of a row of attention: 1 for softmax.',
            '',
            2,
            table=True,
            sweep=True,
        ),
        context=lambda received, setting: {'mass/row': received.mass_BH.mean()},
    ),
    Measure(
        reads=('attention_LPHTS',),
        arrays=lambda attention, setting: {'attention_LHTS': proxy(attention)[:, 0].astype(np.float16)},
        saved=('attention_LHTS',),
        picture=Picture(
            'matrices',
            'attention_LHTS',
            'What attention looks like',
            'attention',
            'One held-out sequence, the heads of each run that give most to its first token; query down, key across.',
            of=lambda attention_LHTS: proxy(attention_LHTS.astype(np.float32)),
            largest=1,
        ),
    ),
)
