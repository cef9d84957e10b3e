"""Massive activations (Sun et al., 2024): entries of hidden states far larger than all others."""

import numpy as np

from sinklab.metrics.metric import (
    Metric,
    MetricInfo,
    merge_disjoint,
    name_by_layer,
)
from sinklab.metrics.norms import make_ratio_metric

MIN_MASSIVE_ENTRY, MIN_MEDIAN_RATIO = 100.0, 1000.0  # the criterion of Sun et al.

STATISTICS = {
    'top': 'The largest entry |h| of the hidden states after each block; the mean over texts.',
    'over_median': 'The largest entry |h| over the median entry, after each block; the mean over texts.',
    'kurtosis': 'Kurtosis E[(h - mean)^4] / variance^2 of entries after each block (normal: 3); the mean over texts.',
    'massive': 'Number of entries |h| above 100 and above 1000 times the median, after each block; mean over texts.',
}


def compute_activation_statistics(residual_LPTD) -> dict:
    """Compute the arrays of STATISTICS for the hidden states after each block, each _LP."""
    flat = residual_LPTD.astype('float32').reshape(*residual_LPTD.shape[:2], -1)
    xp = flat.__array_namespace__()
    size = abs(flat)
    top = size.max(-1)
    median = xp.median(size, -1)
    centred = flat - flat.mean(-1, keepdims=True)
    square = centred * centred
    is_massive = (size > MIN_MASSIVE_ENTRY) & (size > MIN_MEDIAN_RATIO * median[..., None])
    return {
        'top_LP': top,
        'over_median_LP': top / median,
        'kurtosis_LP': (square * square).mean(-1) / square.mean(-1) ** 2,
        'massive_LP': is_massive.sum(-1).astype('float32'),
    }


MAX_TO_MEAN_SENTENCE = 'Largest entry |x| of the input of attention, after the norm, over the mean; mean over texts.'


def compute_max_to_mean(normed_LPTD):
    """Compute max |x| / mean |x| over the entries of each text, _LP."""
    size = abs(normed_LPTD.astype('float32'))
    return size.max((-1, -2)) / size.mean((-1, -2))


METRICS = (
    Metric(
        inputs=('residual_LPTD',),
        compute_arrays=lambda residual, context: compute_activation_statistics(residual),
        compute_numbers=lambda arrays, context: merge_disjoint(
            name_by_layer(f'spike/{name}', np.mean(arrays[f'{name}_LP'], 1)) for name in STATISTICS
        ),
        infos=tuple(
            MetricInfo(f'spike/{name}/{{k}}', f'{name.replace("_", " ")} {{k}}', sentence, digits=1)
            for name, sentence in STATISTICS.items()
        ),
        saved_arrays=tuple(f'{name}_L' for name in STATISTICS),
    ),
    Metric(
        inputs=('normed_LPTD',),
        compute_arrays=lambda normed, context: {'max_to_mean_LP': compute_max_to_mean(normed)},
        compute_numbers=lambda arrays, context: name_by_layer(
            'max_to_mean', np.mean(arrays['max_to_mean_LP'], 1), first=0
        ),
        infos=(MetricInfo('max_to_mean/{k}', 'max to mean {k}', MAX_TO_MEAN_SENTENCE, digits=1),),
        saved_arrays=('max_to_mean_L',),
    ),
    make_ratio_metric(
        'normed_LPTD',
        'normed',
        'norm/normed',
        'Norm of the normalized hidden state that the attention of each layer, from 0, reads: of the first token, '
        'over the mean of the others.',
        first=0,
    ),
)
