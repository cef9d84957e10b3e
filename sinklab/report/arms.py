"""Runs that differ in their seed alone, together: means with their spread, and ours against published."""

import dataclasses

import numpy as np

from sinklab.report import sweep
from sinklab.report.runs import RunResult

EXCLUDED_OUTCOMES = ('diverged', 'refused')  # kinds of ends whose numbers are no result


@dataclasses.dataclass(frozen=True)
class RunGroup:
    name: str
    runs: list[RunResult]

    @property
    def row_info(self) -> dict:
        """row.json, by the name that the arm has here."""
        row_info = self.runs[0].row_info
        return {'source': '', **row_info, 'row': self.name, 'published': row_info.get('published') or {}}

    @property
    def counted_runs(self) -> list[RunResult]:
        """Those that are done; where none is, those under way."""
        done = [run for run in self.runs if run.outcome == 'done']
        return done or [run for run in self.runs if run.outcome not in EXCLUDED_OUTCOMES]


def group_runs(runs: list[RunResult]) -> list[RunGroup]:
    """The baseline first, which changes nothing of its table's default, if it is there; the others as given."""
    run_groups = [RunGroup(name, [run for run in runs if run.group_name == name]) for name in dict.fromkeys(run.group_name for run in runs)]
    return sorted(run_groups, key=lambda run_group: run_group is not find_baseline(run_groups))


def find_baseline(run_groups: list[RunGroup]) -> RunGroup:
    unchanged = [run_group for run_group in run_groups if run_group.row_info.get('diff') == {} and not run_group.row_info.get('from')]
    return (unchanged or run_groups)[0]


def make_group_table(run_groups: list[RunGroup]) -> list[dict]:
    """As of a sweep, and whether a row lies on the published side of the first."""
    rows = sweep.make_sweep_table([make_row_result(run_group) for run_group in run_groups])
    return [row | dict(direction=sweep.compare_direction(row, rows[0])) for row in rows]


def make_row_result(run_group: RunGroup) -> sweep.RowResult:
    key_of_run = {run.name: run.seed if is_only_run_of_seed(run_group, run) else run.name for run in run_group.runs}
    return sweep.RowResult(
        run_group.row_info,
        outcomes={key_of_run[run.name]: run.outcome for run in run_group.runs},
        reasons={key_of_run[run.name]: message for run in run_group.runs if (message := run.outcome_record.get('message'))},
        metrics_by_seed={
            key_of_run[run.name]: sweep.compute_run_metrics(run.records, run.config.get('model.vocabulary')) for run in run_group.counted_runs
        },
    )


def is_only_run_of_seed(run_group: RunGroup, run: RunResult) -> bool:
    return run.seed is not None and [other.seed for other in run_group.runs].count(run.seed) == 1


def compute_mean_curve(runs: list[RunResult], metric_name: str) -> tuple[list[int], np.ndarray, np.ndarray] | None:
    """(steps, mean, sample standard deviation) of a number at the steps that all of several runs recorded it at."""
    curves = [dict(zip(*run.get_curve(metric_name), strict=True)) for run in runs]
    steps = sorted(set.intersection(*map(set, curves))) if len(curves) > 1 else []
    if not steps:
        return None
    values = np.array([[curve[step] for step in steps] for curve in curves])
    return steps, values.mean(0), values.std(0, ddof=1)
