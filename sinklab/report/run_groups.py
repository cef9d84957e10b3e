"""Groups of runs that differ only by seed, and sweep axes: config fields by which groups differ."""

import dataclasses
import json

from sinklab.report import sweep_table
from sinklab.report.runs import RunResult, drop_seed_fields, format_config_value

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


@dataclasses.dataclass(frozen=True)
class SweepAxis:
    """A config field by which run groups differ.

    Attributes:
        field: The path of the field.
        labels: The values of the field in ascending order; the axis is not to scale.
        lines: The groups that differ in no other field, as (index of a label, index of the group).
    """

    field: str
    labels: list[str]
    lines: list[list[tuple[int, int]]]

    @property
    def name(self) -> str:
        return self.field.rpartition('.')[2].replace('_', ' ')


def find_axes(run_groups: list[RunGroup], rows: list[dict]) -> list[SweepAxis]:
    """Find the config fields by which some groups differ while all their other fields are equal.

    Forks are left out, because they differ from other runs in more than the config.

    Args:
        run_groups: The groups of runs.
        rows: The entries of `make_group_table`, in the same order.

    Returns:
        The sweep axes, those with the most groups first.
    """
    configs = {
        index: drop_seed_fields(run_group.runs[0].config)
        for index, (run_group, row) in enumerate(zip(run_groups, rows, strict=True))
        if not run_group.row_info.get('from') and row['ours']
    }
    fields = dict.fromkeys(name for config in configs.values() for name in config)
    axes = [make_axis(field, configs) for field in fields]
    return sorted(filter(None, axes), key=lambda axis: -sum(map(len, axis.lines)))


def make_axis(field: str, configs: dict[int, dict]) -> SweepAxis | None:
    """Make the axis of a field from the configs of groups by index; None if no two groups differ in it alone.

    A field that has a value other than numbers and None has no axis.
    """
    values = [config.get(field) for config in configs.values()]
    are_numbers = all(value is None or type(value) in (int, float) for value in values)
    if not are_numbers or len(set(map(str, values))) < 2:
        return None
    groups: dict[str, list[tuple]] = {}
    for index, config in configs.items():
        if field in config:
            rest_key = json.dumps({name: value for name, value in config.items() if name != field}, sort_keys=True)
            value = config[field]
            groups.setdefault(rest_key, []).append(((value is None, value or 0), format_config_value(value), index))
    lines = [sorted(group) for group in groups.values() if len({label for _, label, _ in group}) > 1]
    if not lines:
        return None
    labels = list(dict.fromkeys(label for _, label, _ in sorted(point for line in lines for point in line)))
    return SweepAxis(field, labels, [[(labels.index(label), index) for _, label, index in line] for line in lines])
