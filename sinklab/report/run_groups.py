"""Groups of runs that differ only by seed, and sweep axes: config fields by which groups differ."""

import dataclasses
import json

import numpy as np

from sinklab.metrics.registry import HEADLINE_METRIC
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
        row_info = self.runs[0].row_info
        return {'source': '', **row_info, 'row': self.name, 'published': row_info.get('published') or {}}

    @property
    def counted_runs(self) -> list[RunResult]:
        """The runs that are done; if there are none, the runs that have neither diverged nor been refused."""
        done = [run for run in self.runs if run.outcome == 'done']
        return done or [run for run in self.runs if run.outcome not in EXCLUDED_OUTCOMES]


def group_runs(runs: list[RunResult]) -> list[RunGroup]:
    """Group runs by their group name, with the baseline first and the others in the given order.

    The baseline is the first group that is no fork and whose row changes nothing in the default config of its table.
    """
    run_groups = [
        RunGroup(name, [run for run in runs if run.group_name == name])
        for name in dict.fromkeys(run.group_name for run in runs)
    ]
    return sorted(run_groups, key=lambda run_group: run_group is not find_baseline(run_groups))


def find_baseline(run_groups: list[RunGroup]) -> RunGroup:
    unchanged = [
        run_group
        for run_group in run_groups
        if run_group.row_info.get('diff') == {} and not run_group.row_info.get('from')
    ]
    return (unchanged or run_groups)[0]


def make_group_table(run_groups: list[RunGroup]) -> list[dict]:
    """Make the entries of the sweep table for groups of runs, and add the direction of each.

    `sweep_table.compare_direction` explains the direction.
    """
    rows = sweep_table.make_sweep_table([make_row_result(run_group) for run_group in run_groups])
    return [row | dict(direction=sweep_table.compare_direction(row, rows[0])) for row in rows]


def make_row_result(run_group: RunGroup) -> sweep_table.RowResult:
    key_of_run = {run.name: run.seed if is_only_run_of_seed(run_group, run) else run.name for run in run_group.runs}
    return sweep_table.RowResult(
        run_group.row_info,
        outcomes={key_of_run[run.name]: run.outcome for run in run_group.runs},
        reasons={
            key_of_run[run.name]: message for run in run_group.runs if (message := run.outcome_record.get('message'))
        },
        metrics_by_seed={
            key_of_run[run.name]: sweep_table.compute_run_metrics(run.records, run.config.get('model.vocabulary'))
            for run in run_group.counted_runs
        },
    )


def is_only_run_of_seed(run_group: RunGroup, run: RunResult) -> bool:
    return run.seed is not None and [other.seed for other in run_group.runs].count(run.seed) == 1


def compute_mean_curve(runs: list[RunResult], metric_name: str) -> tuple[list[int], np.ndarray, np.ndarray] | None:
    """Compute the mean curve of a metric over several runs.

    Returns:
        The steps at which all runs recorded the metric, the mean and the sample standard deviation at each of them.
        None for fewer than two runs, or without a common step.
    """
    if len(runs) < 2:
        return None
    curves = [dict(zip(*run.get_curve(metric_name), strict=True)) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        return None
    values = np.array([[curve[step] for step in steps] for curve in curves])
    return steps, values.mean(0), values.std(0, ddof=1)


AXIS_METRICS = (HEADLINE_METRIC.name, sweep_table.LOSS_METRIC, sweep_table.EMERGENCE_METRIC)
# A None in one of these fields hides no token, so its effective value is that of the second field.
FALLBACK_FIELDS = {'model.mask.window': 'data.length', 'model.mask.block': 'data.length'}


@dataclasses.dataclass(frozen=True)
class AxisPoint:
    """One run group on a sweep axis."""

    group_name: str
    tick: int  # index into the labels of the axis
    ours: dict  # {metric: mean, sd and n}
    published: dict  # {metric: value}


@dataclasses.dataclass(frozen=True)
class SweepAxis:
    """A config field by which run groups differ."""

    field: str
    labels: list[str]  # the values of the field in ascending order; the axis is not to scale
    lines: list[list[AxisPoint]]  # the groups of a line differ in no other field

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
    pairs = [
        (run_group, row)
        for run_group, row in zip(run_groups, rows, strict=True)
        if not run_group.row_info.get('from')
    ]
    run_groups, rows = [run_group for run_group, _ in pairs], [row for _, row in pairs]
    configs = [drop_seed_fields(run_group.runs[0].config) for run_group in run_groups]
    candidates = [make_axis(field, run_groups, configs, rows) for field in find_numeric_fields(configs)]
    return sorted(filter(None, candidates), key=lambda sweep_axis: -sum(map(len, sweep_axis.lines)))


def find_numeric_fields(configs: list[dict]) -> list[str]:
    """Find the fields that differ between configs and whose values are all numbers or None."""
    fields = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name) for config in configs] for name in fields}
    return [
        name
        for name, field_values in values.items()
        if len(set(map(str, field_values))) > 1 and all(map(is_number, field_values))
    ]


def is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def make_axis(field: str, run_groups: list[RunGroup], configs: list[dict], rows: list[dict]) -> SweepAxis | None:
    groups = {}
    for run_group, config, row in zip(run_groups, configs, rows, strict=True):
        if field in config and any(name in row['ours'] for name in AXIS_METRICS):
            rest_key = json.dumps({name: value for name, value in config.items() if name != field}, sort_keys=True)
            groups.setdefault(rest_key, []).append((get_reached_value(field, config), run_group, row))
    groups = [group for group in groups.values() if len({format_config_value(value) for value, *_ in group}) > 1]
    values = sorted({value for group in groups for value, *_ in group}, key=lambda value: (value is None, value or 0))
    lines = [
        [
            AxisPoint(run_group.name, values.index(value), row['ours'], row['published'])
            for value, run_group, row in sort_by_value(group)
        ]
        for group in groups
    ]
    return SweepAxis(field, [format_config_value(value) for value in values], lines) if lines else None


def sort_by_value(group: list[tuple]) -> list[tuple]:
    return sorted(group, key=lambda item: (item[0] is None, item[0] or 0))


def get_reached_value(field: str, config: dict) -> float | None:
    """Return the value of a field, or its effective value if it is None (FALLBACK_FIELDS)."""
    value = config[field]
    return config.get(FALLBACK_FIELDS.get(field, ''), value) if value is None else value
