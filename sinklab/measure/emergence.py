"""When a sink emerges."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Span:
    """The steps between which the sinks of one or several runs emerge.

    Attributes:
        after: The first of them; None where some run has its sink at its first probe.
        at: The last of them; None where no run ends with a sink.
        sinks: How many runs end with a sink.
        runs: How many runs have a probe.
    """

    after: int | None
    at: int | None
    sinks: int
    runs: int

    def cell(self) -> str:
        """Return the steps for a cell of a table, with the count of sinks where some runs have none."""
        if self.at is None:
            return 'none'
        first = 'by ' if self.after is None else f'{self.after}-'
        steps = f'{first}{self.at}' if self.is_learned else 'at start'
        return steps if self.sinks == self.runs else f'{steps} ({self.sinks} of {self.runs})'

    def sentence(self, verb: str = 'emerges') -> str:
        """Return the same for a sentence."""
        if self.at is None:
            return 'no sink'
        first = f'{verb} by step' if self.after is None else f'{verb} between steps {self.after} and'
        steps = f'{first} {self.at}' if self.is_learned else 'as before training'
        return steps if self.sinks == self.runs else f'{steps} in {self.sinks} of {self.runs} runs'

    @property
    def is_learned(self) -> bool:
        """Whether a rate was lower before: at step 0 nothing has been learned yet."""
        return self.after is not None or bool(self.at)


def span(found: Sequence[tuple[int | None, int] | None]) -> Span:
    """Return the steps between which the sinks of runs emerge.

    Args:
        found: of each run that has a probe, what `emergence` returns.
    """
    sinks = [one for one in found if one is not None]
    after = [one for one, _ in sinks if one is not None]
    return Span(
        min(after) if after and len(after) == len(sinks) else None,
        max((at for _, at in sinks), default=None),
        len(sinks),
        len(found),
    )


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
