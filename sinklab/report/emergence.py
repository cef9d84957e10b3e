"""Emergence of the sink in a run: the probes between which it emerges, and the first head that has it.

The sink emerges when Sink_1 passes half of its final value.
"""

import dataclasses

from sinklab.metrics.emergence import (
    EmergenceSpan,
    find_emergence,
    find_first_heads,
    merge_emergence,
)
from sinklab.metrics.registry import HEADLINE_FIGURE, HEADLINE_METRIC
from sinklab.metrics.sink import SINK_THRESHOLD
from sinklab.report.run_groups import AxisPoint, RunGroup
from sinklab.report.runs import RunResult


@dataclasses.dataclass(frozen=True)
class RunEmergence:
    """The emergence of the sink in one run.

    Attributes:
        start_step: The step of the last probe with at most half of the final Sink_1. None if the first probe
            already has more.
        end_step: The step of the first probe from which on Sink_1 stays above half of its final value.
        rate: Sink_1 at `end_step`, in percent.
        first_head: (layer, head), counted from 1, of the first head whose mean alpha_1 stays above the threshold.
            None if there is no such head.
        first_head_step: The first of the loaded probes from which on that head stays above the threshold.
    """

    start_step: int | None
    end_step: int
    rate: float
    first_head: tuple[int, int] | None
    first_head_step: int | None

    @property
    def span(self) -> EmergenceSpan:
        return merge_emergence([(self.start_step, self.end_step)])


@dataclasses.dataclass(frozen=True)
class PointEmergence:
    """The emergence of the sink in the runs of one point of a sweep axis."""

    tick: int  # index into the labels of the axis
    emergences: list[RunEmergence]  # of the runs that learned a sink
    num_runs: int  # with and without a sink


def find_emergences(points: list[AxisPoint], run_groups: list[RunGroup]) -> list[PointEmergence]:
    """Return the emergence of the sink at each point of one line of a sweep axis."""
    runs_of_group = {run_group.name: run_group.counted_runs for run_group in run_groups}
    emergences_by_point = [find_learned_emergences(runs_of_group[point.group_name]) for point in points]
    return [
        PointEmergence(point.tick, point_emergences, len(runs_of_group[point.group_name]))
        for point, point_emergences in zip(points, emergences_by_point, strict=True)
    ]


def find_learned_emergences(runs: list[RunResult]) -> list[RunEmergence]:
    """Return the emergence of each run that learned a sink; a sink at step 0 was not learned."""
    return [
        run_emergence for run in runs if (run_emergence := find_run_emergence(run)) and run_emergence.span.is_learned
    ]


def compute_span(runs: list[RunResult]) -> EmergenceSpan:
    """Return the steps between which the sinks of the runs emerge; skip runs without a probe."""
    run_emergences = [find_run_emergence(run) for run in runs if run.get_last(HEADLINE_METRIC.name) is not None]
    return merge_emergence([item and (item.start_step, item.end_step) for item in run_emergences])


def find_run_emergence(run: RunResult) -> RunEmergence | None:
    steps, rates = run.get_curve(HEADLINE_METRIC.name)
    steps_around = find_emergence(steps, rates)
    return steps_around and RunEmergence(*steps_around, rates[steps.index(steps_around[1])], *find_first_head(run))


def find_first_head(run: RunResult) -> tuple[tuple[int, int] | None, int | None]:
    alpha_NLH = run.probe_values.get(HEADLINE_FIGURE.name, ())
    first = find_first_heads(run.probe_steps, alpha_NLH, SINK_THRESHOLD) if len(alpha_NLH) else ()
    return (first[0][1:], first[0][0]) if first else (None, None)
