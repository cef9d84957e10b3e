"""Position of the sink token, and sink metrics of shorter texts."""

import numpy as np

from sinklab.metrics.metric import (
    Arrays,
    Metric,
    MetricContext,
    MetricInfo,
    merge_disjoint,
    name_by_layer,
)
from sinklab.metrics.norms import compute_norms
from sinklab.metrics.sink import (
    compute_importance,
    compute_learned_key_importance,
    compute_sink_rate,
    count_queries,
    is_sink,
    normalize_rows,
)

NORM_RATIO_SENTENCE = (
    'Norm of the hidden state of the token with the most attention (also a sink token) over the mean of the others, '
    'after each block.'
)


def compute_sink_positions(attention, context: MetricContext) -> Arrays:
    """Find the position (from 0) and alpha of the token with the largest alpha among those of the first half.

    The mean of alpha over heads is returned for all of these tokens, as received_LPJ.
    """
    alpha_LPHJ = compute_importance(
        normalize_rows(attention), context.length // 2, context.learned_keys, context.prefix
    )
    return {
        'place_LPH': alpha_LPHJ.argmax(-1),
        'most_LPH': alpha_LPHJ.max(-1),
        'other_LPH': is_sink(alpha_LPHJ[..., 1:]).sum(-1) / max(1, context.length // 2 - 1),
        'received_LPJ': alpha_LPHJ.mean(2),
    }


def compute_position_numbers(arrays: Arrays, context: MetricContext) -> dict[str, float]:
    position = arrays['place_LPH']
    has_sink = is_sink(arrays['most_LPH'])
    count = max(1, int(has_sink.sum()))
    position_rates = {
        f'place/{k + 1}': 100 * float((has_sink & (position == k)).sum()) / count for k in range(context.keys)
    }
    beyond = 100 * float((has_sink & (position >= context.keys)).sum()) / count
    rates = {'sink/any': compute_sink_rate(arrays['most_LPH']), 'sink/other': 100 * float(arrays['other_LPH'].mean())}
    return rates | position_rates | {'place/beyond': beyond}


def compute_sink_token_arrays(attention, sink, context: MetricContext) -> Arrays:
    """Compute the norm of sink tokens, and their mean alpha over heads, which excludes an implicit key."""
    first = context.learned_keys - sink.shape[-2]
    count = sink.shape[-2]
    alpha_LPHC = compute_learned_key_importance(normalize_rows(attention)[..., first:], count)
    return {'column_LPC': compute_norms(sink), 'received_LPC': alpha_LPHC.mean(2)}


def compute_sink_norm_ratio(arrays: Arrays) -> np.ndarray:
    """Compute ||h_s|| over the mean norm of other tokens, _L; s is the token with the most attention in a text."""
    received_PS = np.mean(arrays['received_LPJ'], 0)
    norm_LPS = np.asarray(arrays['norm_LPT'])
    if 'column_LPC' in arrays:
        received_PS = np.concatenate([np.mean(arrays['received_LPC'], 0), received_PS], -1)
        norm_LPS = np.concatenate([arrays['column_LPC'], norm_LPS], -1)
    sink_P = received_PS.argmax(-1)
    sink_norm_LP = norm_LPS[:, np.arange(len(sink_P)), sink_P]
    others_LP = (norm_LPS.sum(-1) - sink_norm_LP) / (norm_LPS.shape[-1] - 1)
    return sink_norm_LP.mean(1) / others_LP.mean(1)


def compute_length_importance(attention, context: MetricContext) -> Arrays:
    """Compute alpha_k of the first N tokens of each text for all lengths N, as length_LPHJN.

    With a causal mask, attention does not depend on later tokens, so that one forward pass has all lengths.
    """
    share = normalize_rows(attention)[..., context.learned_keys : context.learned_keys + context.keys]
    alphas = [
        share[..., :length, :].sum(-2) / count_queries(length, context.keys, context.prefix)
        for length in context.lengths
    ]
    return {'length_LPHJN': share.__array_namespace__().stack(alphas, -1)}


def compute_length_numbers(arrays: Arrays, context: MetricContext) -> dict[str, float]:
    return merge_disjoint(
        {f'alpha/{k + 1}/T{length}': float(alpha.mean())}
        | {
            f'sink/{k + 1}/T{length}@{threshold:g}': compute_sink_rate(alpha, threshold)
            for threshold in context.thresholds
        }
        for n, length in enumerate(context.lengths)
        for k in range(min(context.keys, length))
        for alpha in [arrays['length_LPHJN'][..., k, n]]
    )


METRICS = (
    Metric(
        inputs=('attention_LPHTS',),
        compute_arrays=compute_sink_positions,
        compute_numbers=compute_position_numbers,
        infos=(
            MetricInfo(
                'sink/any',
                'Sink_any',
                'Share of (text, layer, head) in which a token of the first half has an alpha above 0.3.',
                '%',
                1,
            ),
            MetricInfo(
                'sink/other',
                'Sink_other',
                'The same share for a token that is not the first: share of (text, layer, head, k) with an alpha_k '
                'above 0.3, k from 2 to the middle of the text.',
                '%',
                2,
            ),
            MetricInfo('place/{k}', 'sinks at {k}', 'Share of these sinks that are at token k.', '%', 1),
            MetricInfo('place/beyond', 'sinks beyond', 'Share of these sinks beyond the first tokens.', '%', 1),
        ),
        saved_arrays=('place_LPH', 'most_LPH'),
    ),
    Metric(
        inputs=('attention_LPHTS', 'sink_LPCD'),
        compute_arrays=compute_sink_token_arrays,
    ),
    Metric(
        inputs=('attention_LPHTS', 'residual_LPTD'),  # through the arrays that other metrics compute from them
        compute_numbers=lambda arrays, context: name_by_layer('norm/own', compute_sink_norm_ratio(arrays)),
        infos=(MetricInfo('norm/own/{k}', 'own ratio {k}', NORM_RATIO_SENTENCE),),
    ),
    Metric(
        inputs=('attention_LPHTS',),
        compute_arrays=compute_length_importance,
        compute_numbers=compute_length_numbers,
        infos=(
            MetricInfo('alpha/{k}/T{length}', 'alpha_{k}, T {length}', 'alpha_k of the first T tokens of each text.'),
            MetricInfo(
                'sink/{k}/T{length}@{eps}',
                'Sink_{k}, T {length} > {eps}',
                'Sink_k of the first T tokens, at a threshold.',
                '%',
                1,
            ),
        ),
        saved_arrays=('length_LPHJN',),
        is_applicable=lambda context: bool(context.lengths),
    ),
)
