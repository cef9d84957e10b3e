"""Propositions 1 to 4 (appendix B): what attention to one token, repeated, must be whatever the weights."""

import numpy as np

from sinklab.measure.measure import Arrays, Measure, Number
from sinklab.measure.norms import norms
from sinklab.measure.setting import Setting
from sinklab.measure.sink import EPSILON, proxy
from sinklab.measure.spikes import by_layer
from sinklab.spec import FARTHEST

# By positions, (proposition, number that it bounds); each is at most 0, but for roundings.
RELATIVE = ('relative_paper_code', 'relative_paper_printed', 'relative_paper_negative')
CLAIMS = {
    'none': (1, 'repeated/uneven'),
    **dict.fromkeys((*RELATIVE, 'relative_t5'), (2, 'repeated/relative')),
    'alibi': (3, 'repeated/first'),
    'rotary': (4, 'repeated/bound'),
}
TOLERANCE = 1e-5
SMALLEST = 1e-30  # a sum of weights to divide by


def spread(residual_LPTD):
    """The largest ||h_t - h_1|| over ||h_1||, _LP."""
    return norms(residual_LPTD - residual_LPTD[:, :, :1]).max(-1) / norms(residual_LPTD[:, :, 0]).clip(EPSILON)


def of_distance(share_TS):
    """softmax_i g(t - i): rows whose weights are those of the last one, by distance; all beyond FARTHEST have one."""
    length = share_TS.shape[-1]
    distance_TS = np.subtract.outer(np.arange(length), np.arange(length)).clip(0, FARTHEST)
    weight_TS = share_TS[..., -1, ::-1][..., distance_TS] * np.tri(length)
    return weight_TS / weight_TS.sum(-1, keepdims=True).clip(SMALLEST)


def of_attention(attention, query, key, setting: Setting) -> Arrays:
    """How far scores are from 1/t and from a softmax of the distance, how far the first is above 1/t, and how far any
    is above Proposition 4's bound."""
    share = proxy(attention)[..., setting.columns :]
    xp, place_T = share.__array_namespace__(), np.arange(1, setting.length + 1)
    even_TS = np.tri(setting.length) / place_T[:, None]
    product_LPH = norms(query).max(2) * norms(key[:, :, setting.columns :]).max(2) / query.shape[-1] ** 0.5
    bound = 1 / (1 + (place_T - 1) * xp.exp(-2 * product_LPH)[..., None])
    return {
        'uneven_LPH': abs(share - even_TS).max((-1, -2)),
        'above_LPH': (share[..., 0] - even_TS[:, 0]).max(-1),
        'relative_LPH': abs(share - of_distance(share)).max((-1, -2)),
        'bound_LPH': (share.max(-1) - bound).max(-1),
    }


def numbers(kept: Arrays, setting: Setting) -> dict[str, float]:
    names = {'uneven': 'uneven', 'first': 'above', 'relative': 'relative', 'bound': 'bound'}
    return {f'repeated/{name}': float(np.max(kept[f'{array}_LPH'])) for name, array in names.items()}


def is_within(number: float | None, bound: float) -> bool:
    return number is not None and number <= bound


def verdicts(position: str, numbers: dict[str, float | None]) -> list[tuple[str, float | None, bool]]:
    """(claim, number, whether it holds) of those that are made of these positions, of softmax over whole texts."""
    if position not in CLAIMS:
        return []
    spreads = [value for name, value in numbers.items() if name.startswith('repeated/spread/')]
    largest = None if None in spreads else max(spreads)
    found = [('hidden states are equal after every block', largest, is_within(largest, 10 * TOLERANCE))]
    proposition, name = CLAIMS[position]
    if name in numbers:
        found.append((f'Proposition {proposition}, {name}', numbers[name], is_within(numbers[name], TOLERANCE)))
    return found


MEASURES = (
    Measure(
        reads=('residual_LPTD',),
        arrays=lambda residual, setting: {'spread_LP': spread(residual)},
        numbers=lambda kept, setting: by_layer('repeated/spread', np.max(kept['spread_LP'], 1)),
        shown=(Number('repeated/spread/{k}', 'spread {k}', 'The largest ||h_t - h_1|| / ||h_1|| after each block.'),),
        applies=lambda setting: setting.repeated,
    ),
    Measure(
        reads=('attention_LPHTS', 'query_LPTHK', 'key_LPSHK'),
        arrays=of_attention,
        numbers=numbers,
        shown=(
            Number('repeated/uneven', 'uneven', 'The largest |A_ti - 1/t|: 0 without positions (Proposition 1).'),
            Number(
                'repeated/relative',
                'relative',
                'The largest |A_ti - softmax_i g(t - i)|, g as the last query has it up to a distance of 128, and '
                'the same from there on: 0 under relative positions (Proposition 2).',
            ),
            Number('repeated/first', 'first', 'The largest A_t1 - 1/t: at most 0 under ALiBi (Proposition 3).'),
            Number(
                'repeated/bound',
                'bound',
                'The largest A_ti - e^2x / (e^2x + t - 1), x = ||q|| ||k|| / sqrt(K): at most 0 under rotary '
                'positions (Proposition 4).',
            ),
        ),
        applies=lambda setting: setting.repeated,
    ),
)
