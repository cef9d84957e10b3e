"""When a sink emerges in a run: by half of what it ends with, between two probes, and in which head first."""

import dataclasses

from sinklab.measure.emergence import emergence as of_rates
from sinklab.measure.emergence import first_heads
from sinklab.measure.sink import THRESHOLD
from sinklab.measure.table import HEADLINE, HEADLINE_MAP
from sinklab.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Emergence:
    after: int | None  # the last probe with at most half of it; None: the first probe has more
    at: int  # the first probe from which on there is more
    height: float  # the rate there
    head: tuple[int, int] | None  # (layer, head), from 1, whose mean alpha_1 is first above the threshold for good
    head_at: int | None  # the first of the probes that are drawn in which it is


def emergence(run: Run) -> Emergence | None:
    steps, rates = run.curve(HEADLINE.name)
    found = of_rates(steps, rates)
    return found and Emergence(*found, rates[steps.index(found[1])], *first_head(run))


def first_head(run: Run) -> tuple[tuple[int, int] | None, int | None]:
    alpha_NLH = run.values.get(HEADLINE_MAP.name, ())
    found = first_heads(run.probe_steps, alpha_NLH, THRESHOLD) if len(alpha_NLH) else ()
    return (found[0][1:], found[0][0]) if found else (None, None)
