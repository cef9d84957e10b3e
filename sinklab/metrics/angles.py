"""Angles and norms of queries and keys (section 7.1 and appendix C.1 of the paper)."""

import numpy as np

from sinklab.metrics.metric import (
    FigureSpec,
    Metric,
    MetricContext,
    MetricInfo,
)
from sinklab.metrics.norms import compare_first_with_others, compute_norms, make_norm_infos
from sinklab.metrics.sink import EPSILON

SCORE_PARTS = {
    'cos': 'cos(q_i, k_j)',
    'norms': '||q_i|| ||k_j||',
    'score': '<q_i, k_j> / sqrt(K)',
}
SCORE_KEYS = {'1': 'j = 1', 'other': 'j from 2 to i', 'difference': 'j = 1, minus that for j from 2 to i'}

KEY_TOLERANCE = 1e-6  # standard deviation relative to the norm, below which keys count as equal
KEY_POSITIONS = {'first': '1', 'middle': 'middle'}  # tokens whose keys are compared over texts


def compute_score_parts(query_LPTHK, key_LPTHK):
    """Compute cosines, products of norms, and scaled scores of each query and key, each _LPHTS in float32."""
    query, key = (array.astype('float32').swapaxes(2, 3) for array in (query_LPTHK, key_LPTHK))
    product = query @ key.swapaxes(-1, -2)
    norm_product = compute_norms(query)[..., :, None] * compute_norms(key)[..., None, :]
    return product / norm_product.clip(EPSILON), norm_product, product / query.shape[-1] ** 0.5


def average_first_and_others(value_LPHTS):
    """Average over the queries i > 1 their value with key 1, and their mean value with the keys 2..i, as _LPH2."""
    xp = value_LPHTS.__array_namespace__()
    length = value_LPHTS.shape[-1]
    others = xp.tril(value_LPHTS)[..., 1:, 1:].sum(-1) / xp.arange(1, length)
    return xp.stack([value_LPHTS[..., 1:, 0].mean(-1), others.mean(-1)], -1)


def compute_score_averages(query, key, context: MetricContext) -> dict:
    parts = compute_score_parts(query, key[:, :, context.learned_keys :])
    return {f'{name}_LPH2': average_first_and_others(value) for name, value in zip(SCORE_PARTS, parts, strict=True)}


def compute_score_numbers(arrays, context: MetricContext) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name in SCORE_PARTS:
        first, other = (float(arrays[f'{name}_LPH2'][..., index].mean()) for index in range(2))
        numbers |= {f'qk/{name}/1': first, f'qk/{name}/other': other, f'qk/{name}/difference': first - other}
    return numbers


def compute_effective_rank(key_LPHK) -> np.ndarray:
    """Compute (sum l)^2 / sum l^2 with the variances l over texts, _LH; 1 if keys are equal or on a line."""
    key_LHPK = np.asarray(key_LPHK, np.float64).swapaxes(1, 2)
    squared_norm_LH = (key_LHPK**2).sum((-1, -2))
    key_LHPK -= key_LHPK.mean(-2, keepdims=True)
    gram = key_LHPK @ key_LHPK.swapaxes(-1, -2)  # has the eigenvalues of the covariance
    total = gram.trace(0, -2, -1)
    squares = (gram**2).sum((-1, -2))
    has_variance = total > KEY_TOLERANCE**2 * squared_norm_LH
    return np.where(has_variance, total**2 / np.where(has_variance, squares, 1), 1)


def select_keys(key_LPSHK, context: MetricContext) -> dict:
    """Select the keys of the first token and of the middle token."""
    first = context.learned_keys
    middle = context.learned_keys + context.length // 2
    return {'first_key_LPHK': key_LPSHK[:, :, first], 'middle_key_LPHK': key_LPSHK[:, :, middle]}


METRICS = (
    Metric(
        inputs=('query_LPTHK', 'key_LPSHK'),
        compute_arrays=compute_score_averages,
        compute_numbers=compute_score_numbers,
        infos=tuple(
            MetricInfo(f'qk/{name}/{part}', f'q.k {name} {part}', f'Mean over i > 1 of {formula} for {keys}.')
            for name, formula in SCORE_PARTS.items()
            for part, keys in SCORE_KEYS.items()
        ),
        saved_arrays=tuple(f'{name}_LH2' for name in SCORE_PARTS),
        figure=FigureSpec(
            'heads',
            'cos_LH2',
            'Cosine of queries and keys',
            'cos',
            'cos(q, k_1) minus the mean of the others.',
            transform=lambda cos: cos @ [1, -1],
        ),
    ),
)
OFFLINE_METRICS = (
    Metric(
        inputs=('query_LPTHK',),
        compute_arrays=lambda query, context: {'query_LPT': compute_norms(query).mean(-1)},
        compute_numbers=lambda arrays, context: compare_first_with_others('query', arrays['query_LPT']),
        infos=make_norm_infos('query'),
        saved_arrays=('query_LT',),
    ),
    Metric(
        inputs=('key_LPSHK',),
        compute_arrays=select_keys,
        compute_numbers=lambda arrays, context: {
            f'key/rank/{part}': float(compute_effective_rank(arrays[f'{name}_key_LPHK']).mean())
            for name, part in KEY_POSITIONS.items()
        },
        infos=tuple(
            MetricInfo(
                f'key/rank/{part}',
                f'key rank {part}',
                'Effective number of dimensions in which a key varies over texts, (sum l)^2 / sum l^2 with '
                'variances l, for the first and for the middle token; mean over heads.',
                digits=1,
            )
            for part in KEY_POSITIONS.values()
        ),
    ),
)
