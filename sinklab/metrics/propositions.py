"""Propositions 1 to 4 (appendix B): bounds on attention over one repeated token."""

import numpy as np

from sinklab.config.spec import MAX_RELATIVE_DISTANCE
from sinklab.metrics.metric import (
    Arrays,
    Metric,
    MetricContext,
    MetricInfo,
    name_by_layer,
)
from sinklab.metrics.norms import compute_norms
from sinklab.metrics.sink import EPSILON, normalize_rows

MIN_WEIGHT_SUM = 1e-30  # the least divisor


def compute_spread(residual_LPTD):
    """Compute the largest ||h_t - h_1|| / ||h_1|| over t, for each layer and sequence."""
    return compute_norms(residual_LPTD - residual_LPTD[:, :, :1]).max(-1) / compute_norms(
        residual_LPTD[:, :, 0]
    ).clip(EPSILON)


def apply_last_row_by_distance(share_TS):
    """Apply the weights of the last row to all rows by distance: softmax_i g(t - i).

    All distances beyond MAX_RELATIVE_DISTANCE have the same weight.
    """
    length = share_TS.shape[-1]
    distance_TS = np.subtract.outer(np.arange(length), np.arange(length)).clip(0, MAX_RELATIVE_DISTANCE)
    weight_TS = share_TS[..., -1, ::-1][..., distance_TS] * np.tri(length)
    return weight_TS / weight_TS.sum(-1, keepdims=True).clip(MIN_WEIGHT_SUM)


def compute_bound_violations(attention, query, key, context: MetricContext) -> Arrays:
    """Compute how far normalized attention violates the propositions on texts of one repeated token.

    Returns:
        uneven_LPH: the largest distance from 1/t.
        above_LPH: the largest excess of the first token over 1/t.
        relative_LPH: the largest distance from a softmax of the distance alone.
        bound_LPH: the largest excess over the bound of Proposition 4.
    """
    share = normalize_rows(attention)[..., context.learned_keys :]
    xp = share.__array_namespace__()
    position_T = np.arange(1, context.length + 1)
    even_TS = np.tri(context.length) / position_T[:, None]
    product_LPH = (
        compute_norms(query).max(2) * compute_norms(key[:, :, context.learned_keys :]).max(2) / query.shape[-1] ** 0.5
    )
    bound = 1 / (1 + (position_T - 1) * xp.exp(-2 * product_LPH)[..., None])
    return {
        'uneven_LPH': abs(share - even_TS).max((-1, -2)),
        'above_LPH': (share[..., 0] - even_TS[:, 0]).max(-1),
        'relative_LPH': abs(share - apply_last_row_by_distance(share)).max((-1, -2)),
        'bound_LPH': (share.max(-1) - bound).max(-1),
    }


def compute_proposition_numbers(arrays: Arrays, context: MetricContext) -> dict[str, float]:
    names = {'uneven': 'uneven', 'first': 'above', 'relative': 'relative', 'bound': 'bound'}
    return {f'repeated/{name}': float(np.max(arrays[f'{array}_LPH'])) for name, array in names.items()}


METRICS = (
    Metric(
        inputs=('residual_LPTD',),
        compute_arrays=lambda residual, context: {'spread_LP': compute_spread(residual)},
        compute_numbers=lambda arrays, context: name_by_layer('repeated/spread', np.max(arrays['spread_LP'], 1)),
        infos=(
            MetricInfo('repeated/spread/{k}', 'spread {k}', 'The largest ||h_t - h_1|| / ||h_1|| after each block.'),
        ),
        is_applicable=lambda context: context.repeated,
    ),
    Metric(
        inputs=('attention_LPHTS', 'query_LPTHK', 'key_LPSHK'),
        compute_arrays=compute_bound_violations,
        compute_numbers=compute_proposition_numbers,
        infos=(
            MetricInfo('repeated/uneven', 'uneven', 'The largest |A_ti - 1/t|: 0 without positions (Proposition 1).'),
            MetricInfo(
                'repeated/relative',
                'relative',
                'The largest |A_ti - softmax_i g(t - i)|, with g of the last query up to a distance of 128 '
                'and constant beyond: 0 under relative positions (Proposition 2).',
            ),
            MetricInfo('repeated/first', 'first', 'The largest A_t1 - 1/t: at most 0 under ALiBi (Proposition 3).'),
            MetricInfo(
                'repeated/bound',
                'bound',
                'The largest A_ti - e^2x / (e^2x + t - 1), x = ||q|| ||k|| / sqrt(K): at most 0 under rotary '
                'positions (Proposition 4).',
            ),
        ),
        is_applicable=lambda context: context.repeated,
    ),
)
