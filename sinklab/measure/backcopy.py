"""Bigram-Backcopy: triggers and other queries apart, for they want different things of attention."""

import numpy as np

from sinklab.measure.measure import Measure, Number
from sinklab.measure.sink import proxy


def attention(first_LPHT, trigger_PT) -> dict[str, float]:
    """Mean attention to the first token, from triggers and from the others; the first query has no choice."""
    first_PT = np.asarray(first_LPHT).mean((0, 2))[:, 1:]
    return {f'alpha/1/{side}': mean(first_PT, where) for side, where in sides(trigger_PT[:, 1:])}


def losses(loss_NT, right_NT, trigger_NT) -> dict[str, float]:
    """Mean loss after triggers and after others, and how often the likeliest token after a trigger is the next."""
    split = {f'valid/loss/{side}': mean(loss_NT, where) for side, where in sides(trigger_NT)}
    return split | {'valid/accuracy/trigger': mean(right_NT, trigger_NT)}


def sides(trigger_NT):
    return ('trigger', trigger_NT), ('other', ~trigger_NT)


def mean(values_NT, where_NT) -> float:
    return float(np.mean(np.asarray(values_NT), where=where_NT))


SENTENCE = 'Mean attention to the first token from triggers, and from other queries.'
MEASURES = (
    Measure(
        reads=('attention_LPHTS',),
        arrays=lambda attention, setting: {'first_LPHT': proxy(attention)[..., setting.columns]},
        numbers=lambda kept, setting: attention(kept['first_LPHT'], kept['trigger_PT']),
        shown=tuple(Number(f'alpha/1/{side}', f'alpha_1 {side}', SENTENCE) for side in ('trigger', 'other')),
        applies=lambda setting: setting.triggers,
    ),
)
