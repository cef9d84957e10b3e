"""Sweeps: the numeric fields in which arms differ, and what they end with along each."""

import dataclasses
import json

from sinklab.measure.table import HEADLINE
from sinklab.report import sweep
from sinklab.report.arms import Arm
from sinklab.report.labels import comparable, text

NUMBERS = (HEADLINE.name, sweep.LOSS, sweep.EMERGES)
# Where a field that is None hides nothing, it reaches as far as another one.
REACH = {'model.mask.window': 'data.length', 'model.mask.block': 'data.length'}


@dataclasses.dataclass(frozen=True)
class Point:
    arm: str
    at: int  # of the axis' labels
    ours: dict  # {name: spread}
    published: dict


@dataclasses.dataclass(frozen=True)
class Axis:
    field: str
    labels: list[str]  # the values, in their order and not to scale
    lines: list[list[Point]]  # each of arms that differ in nothing else

    @property
    def name(self) -> str:
        return self.field.rpartition('.')[2].replace('_', ' ')


def axes(arms: list[Arm], rows: list[dict]) -> list[Axis]:
    """Of every field by which some arms, alike in all else, can be laid side by side; those of most arms first.

    Forks are left out: they have more than a config otherwise.
    """
    pairs = [(arm, row) for arm, row in zip(arms, rows, strict=True) if not arm.about.get('from')]
    arms, rows = [arm for arm, _ in pairs], [row for _, row in pairs]
    configs = [comparable(arm.runs[0].config) for arm in arms]
    found = [axis(field, arms, configs, rows) for field in numeric(configs)]
    return sorted(filter(None, found), key=lambda one: -sum(map(len, one.lines)))


def numeric(configs: list[dict]) -> list[str]:
    """The fields that differ, and are numbers or nothing."""
    fields = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name) for config in configs] for name in fields}
    return [name for name, those in values.items() if len(set(map(str, those))) > 1 and all(map(is_number, those))]


def is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def axis(field: str, arms: list[Arm], configs: list[dict], rows: list[dict]) -> Axis | None:
    groups = {}
    for arm, config, row in zip(arms, configs, rows, strict=True):
        if field in config and any(name in row['ours'] for name in NUMBERS):
            rest = json.dumps({name: value for name, value in config.items() if name != field}, sort_keys=True)
            groups.setdefault(rest, []).append((place(field, config), arm, row))
    groups = [group for group in groups.values() if len({text(value) for value, *_ in group}) > 1]
    values = sorted({value for group in groups for value, *_ in group}, key=lambda value: (value is None, value or 0))
    lines = [
        [Point(arm.name, values.index(value), row['ours'], row['published']) for value, arm, row in ordered(group)]
        for group in groups
    ]
    return Axis(field, [text(value) for value in values], lines) if lines else None


def ordered(group: list[tuple]) -> list[tuple]:
    return sorted(group, key=lambda one: (one[0] is None, one[0] or 0))


def place(field: str, config: dict) -> float | None:
    """The value of a field, or what it reaches where it is None."""
    value = config[field]
    return config.get(REACH.get(field, ''), value) if value is None else value
