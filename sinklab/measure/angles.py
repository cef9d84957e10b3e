"""Where queries and keys point, and how long they are: what a score is made of (section 7.1, appendix C.1)."""

import numpy as np

from sinklab.measure.measure import Measure, Number, Picture
from sinklab.measure.norms import first_and_others, norms, numbers_of
from sinklab.measure.setting import Setting
from sinklab.measure.sink import EPSILON

PARTS = {
    'cos': 'Mean over i > 1 of cos(q_i, k_j): for j = 1, for j from 2 to i, and their difference.',
    'norms': 'Mean over i > 1 of ||q_i|| ||k_j||: for j = 1, for j from 2 to i, and their difference.',
    'score': 'Mean over i > 1 of <q_i, k_j> / sqrt(K): for j = 1, for j from 2 to i, and their difference.',
}

ROUNDING = 1e-6  # of keys, beside their length
PLACES = {'first': '1', 'middle': 'middle'}  # whose keys are compared over texts


def products(query_LPTHK, key_LPTHK):
    """(cosines, products of norms, scaled scores) of every query and key, _LPHTS in float32."""
    query, key = (array.astype('float32').swapaxes(2, 3) for array in (query_LPTHK, key_LPTHK))
    product = query @ key.swapaxes(-1, -2)
    length = norms(query)[..., :, None] * norms(key)[..., None, :]
    return product / length.clip(EPSILON), length, product / query.shape[-1] ** 0.5


def first_and_other(value_LPHTS):
    """Means over the queries i > 1 of what they have with key 1, and with the mean of the keys 2..i, _LPH2."""
    xp, length = value_LPHTS.__array_namespace__(), value_LPHTS.shape[-1]
    others = xp.tril(value_LPHTS)[..., 1:, 1:].sum(-1) / xp.arange(1, length)
    return xp.stack([value_LPHTS[..., 1:, 0].mean(-1), others.mean(-1)], -1)


def of_scores(query, key, setting: Setting) -> dict:
    found = products(query, key[:, :, setting.columns :])
    return {f'{name}_LPH2': first_and_other(value) for name, value in zip(PARTS, found, strict=True)}


def numbers(kept, setting: Setting) -> dict[str, float]:
    found = {}
    for name in PARTS:
        first, other = (float(kept[f'{name}_LPH2'][..., at].mean()) for at in range(2))
        found |= {f'qk/{name}/1': first, f'qk/{name}/other': other, f'qk/{name}/difference': first - other}
    return found


def rank(key_LPHK) -> np.ndarray:
    """(sum of l)^2 / sum of l^2, l the variances over texts: 1 where keys are equal or on a line, _LH."""
    key_LHPK = np.float64(key_LPHK).swapaxes(1, 2)
    length_LH = (key_LHPK**2).sum((-1, -2))
    key_LHPK -= key_LHPK.mean(-2, keepdims=True)
    gram = key_LHPK @ key_LHPK.swapaxes(-1, -2)  # has the eigenvalues of the covariance
    total, squares = gram.trace(0, -2, -1), (gram**2).sum((-1, -2))
    differs = total > ROUNDING**2 * length_LH
    return np.where(differs, total**2 / np.where(differs, squares, 1), 1)


def keys(key_LPSHK, setting: Setting) -> dict:
    """Those of the first token, and of the one in the middle."""
    first, middle = setting.columns, setting.columns + setting.length // 2
    return {'first_key_LPHK': key_LPSHK[:, :, first], 'middle_key_LPHK': key_LPSHK[:, :, middle]}


MEASURES = (
    Measure(
        reads=('query_LPTHK', 'key_LPSHK'),
        arrays=of_scores,
        numbers=numbers,
        shown=tuple(
            Number(f'qk/{name}/{of}', f'q.k {name} {of}', sentence)
            for name, sentence in PARTS.items()
            for of in ('1', 'other', 'difference')
        ),
        saved=tuple(f'{name}_LH2' for name in PARTS),
        picture=Picture(
            'heads',
            'cos_LH2',
            'Where keys point',
            'cos',
            'cos(q, k_1) less the others.',
            of=lambda cos: cos @ [1, -1],
        ),
    ),
)
DEEPER = (
    Measure(
        reads=('query_LPTHK',),
        arrays=lambda query, setting: {'query_LPT': norms(query).mean(-1)},
        numbers=lambda kept, setting: first_and_others('query', kept['query_LPT']),
        shown=numbers_of('query'),
        saved=('query_LT',),
    ),
    Measure(
        reads=('key_LPSHK',),
        arrays=keys,
        numbers=lambda kept, setting: {
            f'key/rank/{of}': float(rank(kept[f'{name}_key_LPHK']).mean()) for name, of in PLACES.items()
        },
        shown=tuple(
            Number(
                f'key/rank/{of}',
                f'key rank {of}',
                'Effective number of dimensions in which a key varies over texts, (sum l)^2 / sum l^2 with l the '
                'variances: of the first token, and of the token in the middle; the mean over heads.',
                digits=1,
            )
            for of in PLACES.values()
        ),
    ),
)
