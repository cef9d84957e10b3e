"""When a sink emerges."""

from collections.abc import Sequence

import numpy as np

LEAST = 1.0  # percent: what ends below has no sink


def emergence(steps: Sequence[int], rates: Sequence[float]) -> tuple[int | None, int] | None:
    """(the last step with at most half of the final rate, None where there is none; the first one that stays above).

    It emerges between the two, which is what the spacing of the steps leaves open. None where it does not.
    """
    if not len(rates) or rates[-1] < LEAST:
        return None
    below = [at for at, rate in enumerate(rates) if not rate > rates[-1] / 2]
    at = below[-1] + 1 if below else 0
    return (steps[at - 1] if at else None), steps[at]


def middle(after: int | None, at: int) -> float:
    """The step of emergence as one number, right to within half of what lies between two probes."""
    return float(at) if after is None else (after + at) / 2


def between(after: int | None, at: int) -> str:
    """Return the steps between which a sink emerges, for a cell of a table."""
    if after is None:
        return f'by {at}' if at else 'at start'
    return f'{after}-{at}'


def in_words(after: int | None, at: int) -> str:
    """Return the same for a sentence."""
    if after is None:
        return f'by step {at}' if at else 'before training'
    return f'between steps {after} and {at}'


def first_heads(steps: Sequence[int], alpha_NLH: np.ndarray, threshold: float) -> list[tuple[int, int, int]]:
    """(step, layer, head), from 1, of every head whose alpha is above a threshold at the end: from which step on.

    The earliest first, of those of a step the strongest.
    """
    alpha_NLH = np.asarray(alpha_NLH)
    above_NLH = alpha_NLH > threshold
    stays_NLH = np.flip(np.logical_and.accumulate(np.flip(above_NLH, 0)), 0)
    heads = np.argwhere(stays_NLH[-1])
    first = [(int(stays_NLH[:, layer, head].argmax()), int(layer), int(head)) for layer, head in heads]
    ordered = sorted(first, key=lambda one: (one[0], -alpha_NLH[one]))
    return [(int(steps[at]), layer + 1, head + 1) for at, layer, head in ordered]
