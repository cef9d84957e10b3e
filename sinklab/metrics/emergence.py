"""Emergence of attention sinks: the training steps between which they appear."""

import dataclasses
from collections.abc import Sequence

import numpy as np

MIN_FINAL_RATE_PERCENT = 5.0


def has_sink(final_rate: float, rate_before_training: float = 0.0) -> bool:
    """Return whether training ends with a sink that it has brought about; rates are in percent."""
    return final_rate > max(MIN_FINAL_RATE_PERCENT, rate_before_training)


def find_emergence(steps: Sequence[int], rates: Sequence[float]) -> tuple[int | None, int] | None:
    """Find the two steps between which a sink emerges.

    Args:
        steps: The steps of the probes.
        rates: Sink_1 of each probe, in percent.

    Returns:
        (the last step with at most half of the final rate, or None if there is none; the first step after which the
        rate stays above half of the final rate). None if the final rate is at most MIN_FINAL_RATE_PERCENT, or at most
        that of a probe at step 0, before training.
    """
    if not len(rates):
        return None
    if not has_sink(rates[-1], rates[0] if steps[0] == 0 else 0.0):
        return None
    below = [index for index, rate in enumerate(rates) if not rate > rates[-1] / 2]
    index = below[-1] + 1 if below else 0
    return (steps[index - 1] if index else None), steps[index]


def estimate_step(start_step: int | None, end_step: int) -> float:
    """Estimate the step of emergence; the error is at most half of the interval between two probes."""
    return float(end_step) if start_step is None else (start_step + end_step) / 2


@dataclasses.dataclass(frozen=True)
class EmergenceSpan:
    """The steps between which the sinks of one or several runs emerge.

    Attributes:
        start_step: The first of them; None if some run has its sink at its first probe.
        end_step: The last of them; None if no run ends with a sink.
        num_sinks: How many runs end with a sink.
        num_runs: How many runs have a probe.
    """

    start_step: int | None
    end_step: int | None
    num_sinks: int
    num_runs: int

    def format_cell(self) -> str:
        """Return the steps for a cell of a table, with the count of sinks where some runs have none."""
        if self.end_step is None:
            return 'none'
        start = 'by ' if self.start_step is None else f'{self.start_step}-'
        steps = f'{start}{self.end_step}' if self.is_learned else 'at start'
        return steps if self.num_sinks == self.num_runs else f'{steps} ({self.num_sinks} of {self.num_runs})'

    def format_sentence(self) -> str:
        """Return the same for a sentence about one run."""
        if self.end_step is None:
            return 'does not emerge'
        start = 'emerges by step' if self.start_step is None else f'emerges between steps {self.start_step} and'
        return f'{start} {self.end_step}' if self.is_learned else 'as before training'

    @property
    def is_learned(self) -> bool:
        """Return whether an earlier rate was lower; at step 0 nothing has been learned yet."""
        return self.start_step is not None or bool(self.end_step)


def merge_emergence(emergences: Sequence[tuple[int | None, int] | None]) -> EmergenceSpan:
    """Return the steps between which the sinks of runs emerge.

    Args:
        emergences: What `find_emergence` returns for each run that has a probe.
    """
    sinks = [steps for steps in emergences if steps is not None]
    start_steps = [steps for steps, _ in sinks if steps is not None]
    return EmergenceSpan(
        min(start_steps) if start_steps and len(start_steps) == len(sinks) else None,
        max((end_step for _, end_step in sinks), default=None),
        len(sinks),
        len(emergences),
    )


def find_first_heads(steps: Sequence[int], alpha_NLH: np.ndarray, threshold: float) -> list[tuple[int, int, int]]:
    """Find the heads that end with a sink, and the step from which on each of them has it.

    Args:
        steps: The steps of the N probes.
        alpha_NLH: alpha_1 of each probe, layer and head.
        threshold: The threshold of the sink indicator.

    Returns:
        (step, layer, head) of each head, with layers and heads from 0; the earliest first, and at one step the
        largest alpha first.
    """
    alpha_NLH = np.asarray(alpha_NLH)
    above_NLH = alpha_NLH > threshold
    stays_NLH = np.flip(np.logical_and.accumulate(np.flip(above_NLH, 0)), 0)
    heads = np.argwhere(stays_NLH[-1])
    entries = [(int(stays_NLH[:, layer, head].argmax()), int(layer), int(head)) for layer, head in heads]
    ordered = sorted(entries, key=lambda entry: (entry[0], -alpha_NLH[entry]))
    return [(int(steps[index]), layer, head) for index, layer, head in ordered]
