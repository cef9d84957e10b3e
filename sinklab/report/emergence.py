"""When a sink emerges in a run: by half of what it ends with, between two probes, and in which head first."""

import dataclasses

from sinklab.metrics.emergence import EmergenceSpan, find_first_heads
from sinklab.metrics.emergence import find_emergence as of_rates
from sinklab.metrics.emergence import merge_emergence as span_of
from sinklab.metrics.registry import HEADLINE_FIGURE, HEADLINE_METRIC
from sinklab.metrics.sink import SINK_THRESHOLD
from sinklab.report.run_groups import AxisPoint, RunGroup
from sinklab.report.runs import RunResult


@dataclasses.dataclass(frozen=True)
class RunEmergence:
    start_step: int | None  # the last probe with at most half of it; None: the first probe has more
    end_step: int  # the first probe from which on there is more
    rate: float  # the rate there
    first_head: (
        tuple[int, int] | None
    )  # (layer, head), from 1, whose mean alpha_1 is first above the threshold for good
    first_head_step: int | None  # the first of the probes that are drawn in which it is

    @property
    def span(self) -> EmergenceSpan:
        return span_of([(self.start_step, self.end_step)])


@dataclasses.dataclass(frozen=True)
class PointEmergence:
    """The runs at one place of an axis."""

    tick: int  # of the axis' labels
    emergences: list[RunEmergence]  # of those that end with a sink
    num_runs: int  # all of them


def find_emergences(points: list[AxisPoint], run_groups: list[RunGroup]) -> list[PointEmergence]:
    """Of each point of an axis' line."""
    runs_of_group = {run_group.name: run_group.counted_runs for run_group in run_groups}
    emergences_by_point = [select_learned(runs_of_group[point.group_name]) for point in points]
    return [
        PointEmergence(point.tick, point_emergences, len(runs_of_group[point.group_name]))
        for point, point_emergences in zip(points, emergences_by_point, strict=True)
    ]


def select_learned(runs: list[RunResult]) -> list[RunEmergence]:
    """Return the emergences of the runs in which a sink was learned: not those that had it at step 0."""
    return [
        run_emergence for run in runs if (run_emergence := find_run_emergence(run)) and run_emergence.span.is_learned
    ]


def compute_span(runs: list[RunResult]) -> EmergenceSpan:
    """Return the probes between which the sinks of runs emerge."""
    run_emergences = [find_run_emergence(run) for run in runs if run.get_last(HEADLINE_METRIC.name) is not None]
    return span_of([item and (item.start_step, item.end_step) for item in run_emergences])


def find_run_emergence(run: RunResult) -> RunEmergence | None:
    steps, rates = run.get_curve(HEADLINE_METRIC.name)
    steps_around = of_rates(steps, rates)
    return steps_around and RunEmergence(*steps_around, rates[steps.index(steps_around[1])], *find_first_head(run))


def find_first_head(run: RunResult) -> tuple[tuple[int, int] | None, int | None]:
    alpha_NLH = run.probe_values.get(HEADLINE_FIGURE.name, ())
    first = find_first_heads(run.probe_steps, alpha_NLH, SINK_THRESHOLD) if len(alpha_NLH) else ()
    return (first[0][1:], first[0][0]) if first else (None, None)
