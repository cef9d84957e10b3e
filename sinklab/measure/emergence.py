"""When a sink emerges."""

from collections.abc import Sequence

import numpy as np


def emergence(steps: Sequence[int], values: Sequence[float]) -> tuple[int, int] | None:
    """(the last step before, the first one) at which values are past half of the last of them and stay so.

    It lies between the two, which is what the spacing of the steps leaves open. None where nothing emerges.
    """
    value_N = np.asarray(values, float)
    if not len(value_N) or not value_N[-1] > 0:
        return None
    below = np.flatnonzero(~(value_N > value_N[-1] / 2))
    first = below[-1] + 1 if len(below) else 0
    return steps[max(0, first - 1)], steps[first]


def first_heads(steps: Sequence[int], alpha_NLH: np.ndarray, threshold: float) -> list[tuple[int, int, int]]:
    """(step, layer, head), from 1, of every head whose alpha is above a threshold at the end, the earliest first."""
    above_NLH = np.asarray(alpha_NLH) > threshold
    stays_NLH = np.flip(np.logical_and.accumulate(np.flip(above_NLH, 0)), 0)
    found = [
        (steps[int(stays_NLH[:, layer, head].argmax())], layer + 1, head + 1)
        for layer, head in np.argwhere(stays_NLH[-1])
    ]
    return sorted((int(step), int(layer), int(head)) for step, layer, head in found)
