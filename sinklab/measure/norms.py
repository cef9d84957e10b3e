"""Norms of the first token's hidden state, key and value against those of the others."""

import numpy as np

from sinklab.measure.measure import Measure, Number, Picture
from sinklab.measure.setting import Setting

HIDDEN = 'Norm of the first hidden state over the mean of the others, after each block.'
MASSIVE = f'{HIDDEN} Massive activations (Sun et al., 2024) are ratios of hundreds; about 1 is none.'
KEY = 'Norm of the first key, as attended, over the mean of the others, in each block.'
VALUE = 'Norm of the first value over the mean of the others, in each block.'

PLURALS = {'query': 'queries'}


def norms(array_TD):
    """||x_t||_2 of each token, in float32."""
    return array_TD.__array_namespace__().linalg.norm(array_TD.astype('float32'), axis=-1)


def ratio(norm_T) -> np.ndarray:
    """||x_1|| / mean_{t > 1} ||x_t||."""
    norm_T = np.asarray(norm_T)
    return norm_T[..., 0] / norm_T[..., 1:].mean(-1)


def of_blocks(norm_LPT) -> dict[str, float]:
    """norm/ratio/LL after each block, a ratio of means over sequences as in the released code."""
    ratios = ratio(np.mean(norm_LPT, 1))
    return {f'norm/ratio/{layer:02}': float(value) for layer, value in enumerate(ratios, 1)}


def of_text(array_LPSHK, setting: Setting):
    """Means over heads of the norms of the text's keys or values, _LPT."""
    return norms(array_LPSHK[:, :, setting.columns :]).mean(-1)


def first_and_others(name: str, norm_LPT) -> dict[str, float]:
    """norm/NAME/1 and norm/NAME/other, means over sequences, layers and heads, and norm/NAME/ratio, theirs."""
    first, other = float(np.mean(norm_LPT[..., 0])), float(np.mean(norm_LPT[..., 1:]))
    between = first / other if other else np.nan  # keys that are all 0, as those of an untrained Zaya, have no ratio
    return {f'norm/{name}/1': first, f'norm/{name}/other': other, f'norm/{name}/ratio': between}


def numbers_of(name: str) -> tuple[Number, ...]:
    many = PLURALS.get(name, f'{name}s')
    sentence = f'Mean norm of the {many} that attention uses: of the first token, of other tokens, and their ratio.'
    return tuple(Number(f'norm/{name}/{of}', f'{name} norm {of}', sentence) for of in ('1', 'other', 'ratio'))


def of_first(name: str, title: str, sentence: str) -> Measure:
    """Of the text's keys or values."""
    return Measure(
        reads=(f'{name}_LPSHK',),
        arrays=lambda array, setting: {f'{name}_LPT': of_text(array, setting)},
        numbers=lambda kept, setting: first_and_others(name, kept[f'{name}_LPT']),
        shown=numbers_of(name),
        saved=(f'{name}_LT',),
        picture=Picture('ratios', f'{name}_LT', title, 'norm ratio', sentence, of=ratio),
    )


MEASURES = (
    Measure(
        reads=('residual_LPTD',),
        arrays=lambda residual, setting: {'norm_LPT': norms(residual)},
        numbers=lambda kept, setting: of_blocks(kept['norm_LPT']),
        shown=(Number('norm/ratio/{k}', 'norm ratio {k}', HIDDEN),),
        saved=('norm_LT',),
        picture=Picture('ratios', 'norm_LT', 'Hidden states of the first token', 'norm ratio', MASSIVE, of=ratio),
    ),
    of_first('key', 'Keys of the first token', KEY),
    of_first('value', 'Values of the first token', VALUE),
)
