"""Massive activations (Sun et al., 2024): few entries of the stream that are far larger than all others."""

import numpy as np

from sinklab.measure.measure import Measure, Number, union
from sinklab.measure.norms import norms, ratio

LARGE, OVER_MEDIAN = 100.0, 1000.0  # the criterion of Sun et al.

OF_LAYERS = {
    'top': 'The largest entry |h| of the hidden states after each block; the mean over texts.',
    'over_median': 'The largest entry |h| over the median entry, after each block; the mean over texts.',
    'kurtosis': 'Kurtosis E[(h - mean)^4] / variance^2 of entries after each block (normal: 3); the mean over texts.',
    'massive': 'Entries |h| after each block above 100 and above 1000 times the median; the mean over texts.',
}


def of_stream(residual_LPTD) -> dict:
    """top, over_median, kurtosis and massive, each _LP."""
    flat = residual_LPTD.astype('float32').reshape(*residual_LPTD.shape[:2], -1)
    xp, size = flat.__array_namespace__(), abs(flat)
    top, median = size.max(-1), xp.median(size, -1)
    centred = flat - flat.mean(-1, keepdims=True)
    square = centred * centred
    is_massive = (size > LARGE) & (size > OVER_MEDIAN * median[..., None])
    return {
        'top_LP': top,
        'over_median_LP': top / median,
        'kurtosis_LP': (square * square).mean(-1) / square.mean(-1) ** 2,
        'massive_LP': is_massive.sum(-1).astype('float32'),
    }


def by_layer(name: str, value_L) -> dict[str, float]:
    return {f'{name}/{layer:02}': float(value) for layer, value in enumerate(value_L, 1)}


MEASURES = (
    Measure(
        reads=('residual_LPTD',),
        arrays=lambda residual, setting: of_stream(residual),
        numbers=lambda kept, setting: union(
            by_layer(f'spike/{name}', np.mean(kept[f'{name}_LP'], 1)) for name in OF_LAYERS
        ),
        shown=tuple(
            Number(f'spike/{name}/{{k}}', f'{name.replace("_", " ")} {{k}}', said, digits=1)
            for name, said in OF_LAYERS.items()
        ),
        saved=tuple(f'{name}_L' for name in OF_LAYERS),
    ),
    Measure(
        reads=('normed_LPTD',),
        arrays=lambda normed, setting: {'normed_LPT': norms(normed)},
        numbers=lambda kept, setting: by_layer('norm/normed', ratio(np.mean(kept['normed_LPT'], 1))),
        shown=(
            Number(
                'norm/normed/{k}',
                'normed ratio {k}',
                'Norm of the normalized hidden state that the attention of each block reads: of the first token, '
                'over the mean of the others.',
            ),
        ),
        saved=('normed_LT',),
    ),
)
