"""Groups of runs that differ only by seed, and sweep axes: config fields by which groups differ."""

import dataclasses
import json

import numpy as np

from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.report import sweep_table
from sinklab.report.runs import RunResult, drop_seed_fields, format_config_value

EXCLUDED_OUTCOMES = ('diverged', 'refused')  # the metrics of runs with these outcomes are no results
AXIS_METRICS = (HEADLINE_METRIC.name, sweep_table.LOSS_METRIC, sweep_table.EMERGENCE_METRIC)
# A None in one of these fields hides no token, so its effective value is that of the second field.
FALLBACK_FIELDS = {'model.mask.window': 'data.length', 'model.mask.block': 'data.length'}


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

    The baseline is the first group that is no warm start and whose row changes nothing in the default config of its
    table.
    """
    run_groups = [
        RunGroup(name, [run for run in runs if run.group_name == name])
        for name in dict.fromkeys(run.group_name for run in runs)
    ]
    unchanged = [
        run_group
        for run_group in run_groups
        if run_group.row_info.get('diff') == {} and not run_group.row_info.get('from')
    ]
    baseline = (unchanged or run_groups)[0]
    return [baseline, *(run_group for run_group in run_groups if run_group is not baseline)]


def make_group_table(run_groups: list[RunGroup]) -> list[dict]:
    """Make the entries of the sweep table for groups of runs.

    Each entry also has `direction`, as `sweep_table.compare_direction` returns it, and `span`, the EmergenceSpan of
    the group, or None without a probe.
    """
    results = list(map(make_row_result, run_groups))
    spans = sweep_table.compute_spans(results)
    rows = sweep_table.make_sweep_table(results)
    return [
        row | dict(direction=sweep_table.compare_direction(row, rows[0]), span=spans.get(row['row'])) for row in rows
    ]


def make_row_result(run_group: RunGroup) -> sweep_table.RowResult:
    """Return the results of a group by seed, or by the name of the run if the seed is unknown or repeated."""
    seeds = [run.seed for run in run_group.runs]
    seeds_or_names = {run.name: run.seed if seeds.count(run.seed) == 1 else run.name for run in run_group.runs}
    keys = {name: name if key is None else key for name, key in seeds_or_names.items()}
    return sweep_table.RowResult(
        run_group.row_info,
        outcomes={keys[run.name]: run.outcome for run in run_group.runs},
        reasons={keys[run.name]: message for run in run_group.runs if (message := run.outcome_record.get('message'))},
        metrics_by_seed={
            keys[run.name]: sweep_table.compute_run_metrics(run.records, run.config.get('model.vocabulary'))
            for run in run_group.counted_runs
        },
    )


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
        if not run_group.row_info.get('from') and any(name in row['ours'] for name in AXIS_METRICS)
    }
    fields = dict.fromkeys(name for config in configs.values() for name in config)
    axes = [make_axis(field, configs) for field in fields if is_numeric_field(field, configs)]
    return sorted(filter(None, axes), key=lambda axis: -sum(map(len, axis.lines)))


def is_numeric_field(field: str, configs: dict[int, dict]) -> bool:
    """Return whether a field differs between configs and all its values are numbers or None."""
    values = [config.get(field) for config in configs.values()]
    are_numbers = all(value is None or type(value) in (int, float) for value in values)
    return are_numbers and len(set(map(str, values))) > 1


def make_axis(field: str, configs: dict[int, dict]) -> SweepAxis | None:
    """Make the axis of a field from the configs of groups by index; None if no two groups differ in it alone."""
    groups: dict[str, list[tuple]] = {}
    for index, config in configs.items():
        if field in config:
            rest_key = json.dumps({name: value for name, value in config.items() if name != field}, sort_keys=True)
            value = config.get(FALLBACK_FIELDS.get(field, '')) if config[field] is None else config[field]
            groups.setdefault(rest_key, []).append(((value is None, value or 0), format_config_value(value), index))
    lines = [sorted(group) for group in groups.values() if len({label for _, label, _ in group}) > 1]
    if not lines:
        return None
    labels = list(dict.fromkeys(label for _, label, _ in sorted(point for line in lines for point in line)))
    return SweepAxis(field, labels, [[(labels.index(label), index) for _, label, index in line] for line in lines])
