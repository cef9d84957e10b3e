"""When a sink emerges in a run: by half of what it ends with, between two probes, and in which head first."""

import dataclasses

from sinklab.measure.emergence import Span, first_heads
from sinklab.measure.emergence import emergence as of_rates
from sinklab.measure.emergence import span as span_of
from sinklab.measure.sink import THRESHOLD
from sinklab.measure.table import HEADLINE, HEADLINE_MAP
from sinklab.report.arms import Arm
from sinklab.report.axes import Point
from sinklab.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Emergence:
    after: int | None  # the last probe with at most half of it; None: the first probe has more
    at: int  # the first probe from which on there is more
    height: float  # the rate there
    head: tuple[int, int] | None  # (layer, head), from 1, whose mean alpha_1 is first above the threshold for good
    head_at: int | None  # the first of the probes that are drawn in which it is

    @property
    def span(self) -> Span:
        return span_of([(self.after, self.at)])


@dataclasses.dataclass(frozen=True)
class Emerging:
    """The runs at one place of an axis."""

    at: int  # of the axis' labels
    each: list[Emergence]  # of those that end with a sink
    runs: int  # all of them


def emergences(points: list[Point], arms: list[Arm]) -> list[Emerging]:
    """Of each point of an axis' line."""
    runs = {arm.name: arm.counted for arm in arms}
    each = [learned(runs[point.arm]) for point in points]
    return [Emerging(point.at, found, len(runs[point.arm])) for point, found in zip(points, each, strict=True)]


def learned(runs: list[Run]) -> list[Emergence]:
    """Return the emergences of the runs in which a sink was learned: not those that had it at step 0."""
    return [found for run in runs if (found := emergence(run)) and found.span.is_learned]


def span(runs: list[Run]) -> Span:
    """Return the probes between which the sinks of runs emerge."""
    found = [emergence(run) for run in runs if run.last(HEADLINE.name) is not None]
    return span_of([one and (one.after, one.at) for one in found])


def emergence(run: Run) -> Emergence | None:
    steps, rates = run.curve(HEADLINE.name)
    found = of_rates(steps, rates)
    return found and Emergence(*found, rates[steps.index(found[1])], *first_head(run))


def first_head(run: Run) -> tuple[tuple[int, int] | None, int | None]:
    alpha_NLH = run.values.get(HEADLINE_MAP.name, ())
    found = first_heads(run.probe_steps, alpha_NLH, THRESHOLD) if len(alpha_NLH) else ()
    return (found[0][1:], found[0][0]) if found else (None, None)
