"""Sweeps: the numeric fields in which arms differ, and what they end with along each."""

import dataclasses
import json

from sinklab.measure.table import HEADLINE_METRIC
from sinklab.report import sweep
from sinklab.report.arms import RunGroup
from sinklab.report.labels import drop_seed_fields, format_config_value

AXIS_METRICS = (HEADLINE_METRIC.name, sweep.LOSS_METRIC, sweep.EMERGENCE_METRIC)
# Where a field that is None hides nothing, it reaches as far as another one.
FALLBACK_FIELDS = {'model.mask.window': 'data.length', 'model.mask.block': 'data.length'}


@dataclasses.dataclass(frozen=True)
class AxisPoint:
    group_name: str
    tick: int  # of the axis' labels
    ours: dict  # {name: spread}
    published: dict


@dataclasses.dataclass(frozen=True)
class SweepAxis:
    field: str
    labels: list[str]  # the values, in their order and not to scale
    lines: list[list[AxisPoint]]  # each of arms that differ in nothing else

    @property
    def name(self) -> str:
        return self.field.rpartition('.')[2].replace('_', ' ')


def find_axes(run_groups: list[RunGroup], rows: list[dict]) -> list[SweepAxis]:
    """Of every field by which some arms, alike in all else, can be laid side by side; those of most arms first.

    Forks are left out: they have more than a config otherwise.
    """
    pairs = [(run_group, row) for run_group, row in zip(run_groups, rows, strict=True) if not run_group.row_info.get('from')]
    run_groups, rows = [run_group for run_group, _ in pairs], [row for _, row in pairs]
    configs = [drop_seed_fields(run_group.runs[0].config) for run_group in run_groups]
    candidates = [make_axis(field, run_groups, configs, rows) for field in find_numeric_fields(configs)]
    return sorted(filter(None, candidates), key=lambda sweep_axis: -sum(map(len, sweep_axis.lines)))


def find_numeric_fields(configs: list[dict]) -> list[str]:
    """The fields that differ, and are numbers or nothing."""
    fields = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name) for config in configs] for name in fields}
    return [name for name, field_values in values.items() if len(set(map(str, field_values))) > 1 and all(map(is_number, field_values))]


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
        [AxisPoint(run_group.name, values.index(value), row['ours'], row['published']) for value, run_group, row in sort_by_value(group)]
        for group in groups
    ]
    return SweepAxis(field, [format_config_value(value) for value in values], lines) if lines else None


def sort_by_value(group: list[tuple]) -> list[tuple]:
    return sorted(group, key=lambda item: (item[0] is None, item[0] or 0))


def get_reached_value(field: str, config: dict) -> float | None:
    """The value of a field, or what it reaches where it is None."""
    value = config[field]
    return config.get(FALLBACK_FIELDS.get(field, ''), value) if value is None else value
