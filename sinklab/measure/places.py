"""Which token is the sink, wherever it is, and what a text of another length would have."""

import numpy as np

from sinklab.measure.measure import Arrays, Measure, Number, union
from sinklab.measure.norms import norms
from sinklab.measure.setting import Setting
from sinklab.measure.sink import THRESHOLD, importance, proxy, queries, rate
from sinklab.measure.spikes import by_layer

OWN = (
    'Norm of the hidden state of the token with the most attention (also a sink token) over the mean of the others, '
)
OWN += 'after each block.'


def of_places(attention, setting: Setting) -> Arrays:
    """Of the tokens of the first half: place (from 0) and alpha of the largest, and the mean over heads of all."""
    alpha_LPHJ = importance(proxy(attention), setting.length // 2, setting.columns, setting.prefix)
    return {'place_LPH': alpha_LPHJ.argmax(-1), 'most_LPH': alpha_LPHJ.max(-1), 'received_LPJ': alpha_LPHJ.mean(2)}


def numbers(kept: Arrays, setting: Setting) -> dict[str, float]:
    place, found = kept['place_LPH'], kept['most_LPH'] > THRESHOLD
    count = max(1, int(found.sum()))
    first = {f'place/{k + 1}': 100 * float((found & (place == k)).sum()) / count for k in range(setting.keys)}
    beyond = 100 * float((found & (place >= setting.keys)).sum()) / count
    return {'sink/any': rate(kept['most_LPH'])} | first | {'place/beyond': beyond}


def own_ratio(kept: Arrays) -> np.ndarray:
    """||h_s|| over the mean of the others, _L: token s receives most of a text, over all layers and heads."""
    received_PS, norm_LPS = np.mean(kept['received_LPJ'], 0), np.asarray(kept['norm_LPT'])
    if 'column_LPC' in kept:
        received_PS = np.concatenate([np.mean(kept['star_LPH'], (0, 2))[:, None], received_PS], -1)
        norm_LPS = np.concatenate([kept['column_LPC'], norm_LPS], -1)
    at_P = received_PS.argmax(-1)
    own_LP = norm_LPS[:, np.arange(len(at_P)), at_P]
    others_LP = (norm_LPS.sum(-1) - own_LP) / (norm_LPS.shape[-1] - 1)
    return own_LP.mean(1) / others_LP.mean(1)


def of_lengths(attention, setting: Setting) -> Arrays:
    """alpha_k of the first queries, for all lengths, _LPHJN: what is causal knows nothing of the end of a text."""
    share = proxy(attention)[..., setting.columns : setting.columns + setting.keys]
    found = [
        share[..., :length, :].sum(-2) / queries(length, setting.keys, setting.prefix) for length in setting.lengths
    ]
    return {'length_LPHJN': share.__array_namespace__().stack(found, -1)}


def numbers_of_lengths(kept: Arrays, setting: Setting) -> dict[str, float]:
    return union(
        {f'alpha/{k + 1}/T{length}': float(alpha.mean())}
        | {f'sink/{k + 1}/T{length}@{threshold:g}': rate(alpha, threshold) for threshold in setting.thresholds}
        for n, length in enumerate(setting.lengths)
        for k in range(min(setting.keys, length))
        for alpha in [kept['length_LPHJN'][..., k, n]]
    )


MEASURES = (
    Measure(
        reads=('attention_LPHTS',),
        arrays=of_places,
        numbers=numbers,
        shown=(
            Number(
                'sink/any',
                'Sink_any',
                'Share of (text, layer, head) in which a token of the first half has an alpha above 0.3.',
                '%',
                1,
            ),
            Number('place/{k}', 'sinks at {k}', 'The share of these sinks that lie on token k.', '%', 1),
            Number('place/beyond', 'sinks beyond', 'The share that lies on none of the first tokens.', '%', 1),
        ),
        saved=('place_LPH', 'most_LPH'),
    ),
    Measure(
        reads=('sink_LPCD',),
        arrays=lambda sink, setting: {'column_LPC': norms(sink)},
    ),
    Measure(
        reads=('attention_LPHTS', 'residual_LPTD'),  # by way of what other measures keep of them
        numbers=lambda kept, setting: by_layer('norm/own', own_ratio(kept)),
        shown=(Number('norm/own/{k}', 'own ratio {k}', OWN),),
    ),
    Measure(
        reads=('attention_LPHTS',),
        arrays=of_lengths,
        numbers=numbers_of_lengths,
        shown=(
            Number('alpha/{k}/T{length}', 'alpha_{k}, T {length}', 'alpha_k of the first T tokens of each text.'),
            Number(
                'sink/{k}/T{length}@{eps}',
                'Sink_{k}, T {length} > {eps}',
                'Sink_k of the first T tokens, at a threshold.',
                '%',
                1,
            ),
        ),
        saved=('length_LPHJN',),
        applies=lambda setting: bool(setting.lengths),
    ),
)
