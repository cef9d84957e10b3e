"""When a sink emerges in a run: by half of what it ends with, between two probes, and in which head first."""

import dataclasses

import numpy as np

from sinklab.measure.emergence import emergence as of_rates
from sinklab.measure.sink import THRESHOLD
from sinklab.measure.table import HEADLINE, HEADLINE_MAP
from sinklab.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Emergence:
    after: int | None  # the last probe with at most half of it; None: the first probe has more
    at: int  # the first probe from which on there is more
    height: float  # the rate there
    head: tuple[int, int] | None  # (layer, head), the first whose mean alpha_1 is above the threshold
    head_at: int | None  # the first of the probes that are drawn in which it is


def emergence(run: Run) -> Emergence | None:
    steps, rates = run.curve(HEADLINE.name)
    found = of_rates(steps, rates)
    return found and Emergence(*found, rates[steps.index(found[1])], *first_head(run))


def first_head(run: Run) -> tuple[tuple[int, int] | None, int | None]:
    for step, alpha_LH in zip(run.probe_steps, run.values.get(HEADLINE_MAP.name, ()), strict=True):
        if alpha_LH.max() > THRESHOLD:
            layer, head = np.unravel_index(np.argmax(alpha_LH), alpha_LH.shape)
            return (int(layer), int(head)), step
    return None, None
