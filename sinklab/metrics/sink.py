"""Attention-sink metrics (Gu et al., ICLR 2025, section 3).

An attention matrix has T queries and learned_keys + T keys. Learned keys, if there are any, come before the keys of
the text, so the first token is the key with the index `learned_keys`. The zero key of `plus_one` counts as one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sinklab.metrics.metric import (
    Arrays,
    FigureSpec,
    Metric,
    MetricContext,
    MetricInfo,
    make_head_metric,
    merge_disjoint,
)

EPSILON = 1e-8  # of the released code
SINK_THRESHOLD = 0.3  # of the paper: a head whose alpha is above it has a sink
LEARNED_KEY_SENTENCE = 'The same for the column (attention bias or sink token) with the most attention'
EXTRA_THRESHOLDS = (0.2, 0.4, 0.5)  # that Sink_1 is also reported at


def compute_abs_row_sum(attention_TS):
    """Compute sum_j |A_ij| of each row, _T; it is 1 for softmax with gain 1."""
    return abs(attention_TS).sum(-1)


def normalize_rows(attention_TS):
    """Compute the proxy |A_ij| / sum_j |A_ij|, whose rows sum to 1 (the paper, section 6)."""
    return abs(attention_TS) / (compute_abs_row_sum(attention_TS)[..., None] + EPSILON)


def compute_importance(attention_TS, keys: int, learned_keys: int = 0, prefix: int = 0):
    """Compute alpha_k = sum_i A_ik / (number of queries that can see k) for the tokens k = 1..keys."""
    received_J = attention_TS[..., learned_keys : learned_keys + keys].sum(-2)
    return received_J / count_queries(attention_TS.shape[-2], keys, prefix)


def count_queries(length: int, keys: int, prefix: int = 0):
    """Count the queries, of T, that can see each of the tokens 1..keys: T - k + 1, or T within a prefix."""
    position_J = np.arange(keys)
    return length - np.where(position_J < prefix, 0, position_J)


def compute_learned_key_importance(attention_TS, learned_keys: int):
    """Compute alpha_* of each learned key: its mean attention over the T queries of the text."""
    return attention_TS[..., :learned_keys].mean(-2)


def add_own_query(alpha, length: int):
    """Return alpha_* over T + 1 queries, as in the released code.

    The additional first query belongs to the learned key, and sees only that key.
    """
    return (1 + length * alpha) / (length + 1)


def compute_importance_in_reach(attention_TS, reach: int, learned_keys: int = 0):
    """Compute alpha_1 over the queries 1..reach, if a window or block hides the first token from the others."""
    return attention_TS[..., :reach, learned_keys].mean(-1)


def compute_window_edge(attention_TS, window: int, learned_keys: int = 0):
    """Compute the mean of A_i,i-w+1 over the queries i > w: the attention to the first key of their windows."""
    query_T = np.arange(window, attention_TS.shape[-2])
    return attention_TS[..., query_T, learned_keys + query_T - window + 1].mean(-1)


def is_sink(alpha, threshold: float = SINK_THRESHOLD):
    """Return the sink indicator 1(alpha > threshold) of each entry (the paper, equation 5)."""
    return alpha > threshold


def compute_sink_rate(alpha, threshold: float = SINK_THRESHOLD) -> float:
    """Compute Sink_k in percent: the mean of the sink indicator over sequences, layers and heads."""
    return 100 * float(np.mean(is_sink(np.asarray(alpha), threshold)))


def summarize_importance(name: str, alpha) -> dict[str, float]:
    """Return sink/NAME and alpha/NAME of an importance."""
    return {f'sink/{name}': compute_sink_rate(alpha), f'alpha/{name}': float(np.mean(alpha))}


def compute_uniform_importance(
    length: int, learned_keys: int = 0, prefix: int = 0, reach: int | None = None
) -> float:
    """Compute alpha_1 of uniform attention; for a causal mask the harmonic number of T, over T (0.0741 at T = 64).

    The i-th query sees max(i, prefix) tokens and the learned keys; those after the `reach` first ones do not see
    token 1.
    """
    visible_T = np.maximum(np.arange(1, length + 1), prefix) + learned_keys
    return float(np.sum(1 / visible_T[:reach]) / length)


def compute_uniform_alpha(context: MetricContext) -> float:
    return compute_uniform_importance(context.length, context.learned_keys, context.prefix, context.reach)


def compute_sink_numbers(alpha_LPHJ, uniform_alpha: float) -> dict[str, float]:
    """Return sink/k and alpha/k of each token k, Sink_1 at other thresholds, and alpha_1 of uniform attention."""
    threshold_rates = {
        f'sink/1@{threshold}': compute_sink_rate(alpha_LPHJ[..., 0], threshold) for threshold in EXTRA_THRESHOLDS
    }
    tokens = (summarize_importance(str(k + 1), alpha_LPHJ[..., k]) for k in range(alpha_LPHJ.shape[-1]))
    return merge_disjoint(tokens) | threshold_rates | {'alpha/floor': uniform_alpha}


def compute_prefix_numbers(alpha_LPHJ) -> dict[str, float]:
    """Return sink/prefix and argmax/k, in percent of sequences, layers and heads.

    sink/prefix counts where max_k alpha_k is above the threshold, argmax/k where alpha_k is that maximum. The latter
    has no threshold: it also counts heads without a sink.
    """
    largest = np.argmax(alpha_LPHJ, -1)
    argmax_rates = {f'argmax/{k + 1}': 100 * float(np.mean(largest == k)) for k in range(np.shape(alpha_LPHJ)[-1])}
    return {'sink/prefix': compute_sink_rate(np.max(alpha_LPHJ, -1))} | argmax_rates


def summarize_batch_importance(name: str, alpha_BH) -> Arrays:
    """Compute sink/NAME and alpha/NAME of a training batch, in a traced function."""
    return {f'sink/{name}': 100 * is_sink(alpha_BH).mean(), f'alpha/{name}': alpha_BH.mean()}


def compute_first_token_batch_numbers(key_attention_sums: Any, context: MetricContext) -> Arrays:
    share_BHJ = key_attention_sums.share_BHS[..., context.learned_keys :]
    alpha_BHJ = share_BHJ / count_queries(context.length, share_BHJ.shape[-1], context.prefix)
    tokens = (summarize_batch_importance(str(k + 1), alpha_BHJ[..., k]) for k in range(alpha_BHJ.shape[-1]))
    return merge_disjoint(tokens) | {'alpha/floor': np.float32(compute_uniform_alpha(context))}


def make_importance_infos(name: str, sentence: str, **flags: bool) -> tuple[MetricInfo, MetricInfo]:
    """Make the MetricInfo of Sink_k and of alpha_k of an importance."""
    symbol = name.replace('star', '*')
    return (
        MetricInfo(f'sink/{name}', f'Sink_{symbol}', sentence, '%', 1, **flags),
        MetricInfo(f'alpha/{name}', f'alpha_{symbol}', sentence),
    )


def make_importance_metric(
    array_name: str, name: str, sentence: str, compute_value: Callable, in_sweep: bool = False, **fields: Any
) -> Metric:
    """Make a metric of Sink_k and alpha_k from an importance of each sequence, layer and head."""
    infos = make_importance_infos(name, sentence, in_sweep=in_sweep)
    return make_head_metric(
        array_name,
        compute_value,
        infos,
        compute_numbers=lambda alpha_LPH, _: summarize_importance(name, alpha_LPH),
        **fields,
    )


METRICS = (
    Metric(
        inputs=('attention_LPHTS',),
        compute_arrays=lambda attention, context: {
            'alpha_LPHJ': compute_importance(
                normalize_rows(attention), context.keys, context.learned_keys, context.prefix
            )
        },
        compute_numbers=lambda arrays, context: compute_sink_numbers(
            arrays['alpha_LPHJ'], compute_uniform_alpha(context)
        ),
        infos=(
            MetricInfo(
                'sink/1',
                'Sink_1',
                'Share of (text, layer, head) with an alpha_1 above 0.3.',
                '%',
                1,
                in_table=True,
                in_sweep=True,
            ),
            MetricInfo('alpha/1', 'alpha_1', 'Mean attention from queries to the first token.', in_table=True),
            MetricInfo('alpha/floor', 'uniform', 'Value of alpha_1 for uniform attention.', in_table=True),
            *make_importance_infos('{k}', 'The same for token k instead of 1, over the queries that can see it.'),
            MetricInfo('sink/1@{k}', 'Sink_1 at {k}', 'Sink_1 at the threshold k instead of 0.3.', '%', 1),
        ),
        saved_arrays=('alpha_LPHJ',),
        figure=FigureSpec(
            'heads',
            'alpha_LPHJ',
            'Sinks by layer and head',
            'alpha_1',
            transform=lambda alpha: alpha[..., 0].mean(1),
            scale_max=1,
        ),
        compute_batch_numbers=compute_first_token_batch_numbers,
    ),
    make_head_metric(
        'star',
        lambda attention, context: compute_learned_key_importance(
            normalize_rows(attention), context.learned_keys
        ).max(-1),
        (
            *make_importance_infos(
                'star', f'{LEARNED_KEY_SENTENCE}, including its own query.', in_table=True, in_sweep=True
            ),
            *make_importance_infos('star/clean', f'{LEARNED_KEY_SENTENCE}, without its own query.'),
        ),
        compute_numbers=lambda star_LPH, context: (
            summarize_importance('star', add_own_query(star_LPH, context.length))
            | summarize_importance('star/clean', star_LPH)
        ),
        is_applicable=lambda context: context.learned_keys > 0,
        compute_batch_numbers=lambda key_attention_sums, context: summarize_batch_importance(
            'star/clean', key_attention_sums.share_BHS[..., : context.learned_keys].max(-1) / context.length
        ),
    ),
    make_importance_metric(
        'raw',
        '1/raw',
        'The same with A_ij itself instead of the proxy |A_ij| / sum_j |A_ij|.',
        lambda attention, context: compute_importance(attention, 1, context.learned_keys)[..., 0],
        compute_batch_numbers=lambda key_attention_sums, context: summarize_batch_importance(
            '1/raw', key_attention_sums.raw_BHS[..., context.learned_keys] / context.length
        ),
    ),
    make_importance_metric(
        'within',
        '1/window',
        'The same over only the queries whose window or block contains the first token.',
        lambda attention, context: compute_importance_in_reach(
            normalize_rows(attention), context.reach, context.learned_keys
        ),
        in_sweep=True,
        is_applicable=lambda context: context.reach < context.length,
    ),
    make_importance_metric(
        'edge',
        'edge',
        "The same for the first key of each query's attention window instead of token 1.",
        lambda attention, context: compute_window_edge(
            normalize_rows(attention), context.window, context.learned_keys
        ),
        is_applicable=lambda context: context.window is not None,
    ),
    Metric(
        compute_numbers=lambda arrays, context: compute_prefix_numbers(arrays['alpha_LPHJ'][..., : context.prefix]),
        infos=(
            MetricInfo(
                'sink/prefix',
                'Sink_prefix',
                'Share of (text, layer, head) in which a token of the prefix has an alpha above 0.3.',
                '%',
                1,
                in_sweep=True,
            ),
            MetricInfo(
                'argmax/{k}',
                'argmax {k}',
                'Share of (text, layer, head) in which token k has the largest alpha of the prefix.',
                '%',
                1,
            ),
        ),
        is_applicable=lambda context: context.prefix > 0,
    ),
    make_head_metric(
        'mass',
        lambda attention, context: compute_abs_row_sum(attention).mean(-1),
        (
            MetricInfo(
                'mass/row',
                'row mass',
                'Mean of sum_j |A_ij|, the sum of a row of attention: 1 for softmax.',
                '',
                2,
                in_table=True,
                in_sweep=True,
            ),
        ),
        compute_batch_numbers=lambda key_attention_sums, context: {
            'mass/row': key_attention_sums.abs_weight_sum_BH.mean()
        },
    ),
    Metric(
        inputs=('attention_LPHTS',),
        compute_arrays=lambda attention, context: {
            'attention_LHTS': normalize_rows(attention)[:, 0].astype(np.float16)
        },
        saved_arrays=('attention_LHTS',),
        figure=FigureSpec(
            'matrices',
            'attention_LHTS',
            'Attention matrices',
            'attention',
            'Heads of each run with the most attention to the first token of a held-out sequence (rows: queries).',
            transform=lambda attention_LHTS: normalize_rows(attention_LHTS.astype(np.float32)),
            scale_max=1,
        ),
    ),
)
