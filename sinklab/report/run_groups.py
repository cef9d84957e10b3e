"""Groups of runs that differ only by seed."""

import dataclasses

from sinklab.report import sweep_table
from sinklab.report.runs import RunResult

EXCLUDED_OUTCOMES = ('diverged', 'refused')  # the metrics of runs with these outcomes are no results


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """The runs of one row of a report; they differ only by seed."""

    name: str
    runs: list[RunResult]

    @property
    def row_info(self) -> dict:
        """The content of row.json, with the name of the group as its row."""
        return self.runs[0].row_info | {'row': self.name}

    @property
    def counted_runs(self) -> list[RunResult]:
        """The runs that are done; if there are none, the runs that have neither diverged nor been refused."""
        done = [run for run in self.runs if run.outcome == 'done']
        return done or [run for run in self.runs if run.outcome not in EXCLUDED_OUTCOMES]


def group_runs(runs: list[RunResult]) -> list[RunGroup]:
    """Group runs by their group name, with the baseline first.

    The baseline is the first group that is no warm start and whose row changes nothing in the default config of its
    table; other groups of that kind follow it, and then the rest, in the given order.
    """
    run_groups = [
        RunGroup(name, [run for run in runs if run.group_name == name])
        for name in dict.fromkeys(run.group_name for run in runs)
    ]
    return sorted(run_groups, key=is_changed)


def is_changed(run_group: RunGroup) -> bool:
    return run_group.row_info.get('diff') != {} or bool(run_group.row_info.get('from'))


def make_group_table(run_groups: list[RunGroup]) -> list[dict]:
    """Make the entries of `sweep_table.make_sweep_table` for groups of runs, the first of which is the baseline."""
    return sweep_table.make_sweep_table(list(map(make_row_result, run_groups)))


def make_row_result(run_group: RunGroup) -> sweep_table.RowResult:
    """Return the results of a group by seed, or by the name of the run if the seed is unknown or repeated."""
    seeds = [run.seed for run in run_group.runs]
    keys = {
        run.name: run.name if run.seed is None or seeds.count(run.seed) > 1 else run.seed for run in run_group.runs
    }
    return sweep_table.RowResult(
        run_group.row_info,
        outcomes={keys[run.name]: run.outcome for run in run_group.runs},
        reasons={keys[run.name]: message for run in run_group.runs if (message := run.outcome_record.get('message'))},
        metrics_by_seed={
            keys[run.name]: sweep_table.compute_run_metrics(run.records, run.config.get('model.vocabulary'))
            for run in run_group.counted_runs
        },
    )
