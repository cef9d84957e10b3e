"""What runs are called: by their row, what else they have otherwise, and their seed; by their folder at last."""

from collections.abc import Sequence
from pathlib import Path

from sinklab.files.place import make_absolute, find_common_folder, make_relative
from sinklab.folder import CHANGEABLE_PREFIXES
from sinklab.record import UserError

SEED_FIELDS = ('seed', 'data.seed')


def drop_seed_fields(config: dict) -> dict:
    """What two seeds of one arm have alike."""
    return {name: value for name, value in config.items() if name not in SEED_FIELDS and not f'{name}.'.startswith(CHANGEABLE_PREFIXES)}


def make_group_names(rows: list[str], configs: list[dict]) -> list[str]:
    """Of each run: its row, and where another run of the row differs by more than a seed, what it has there."""
    comparable_configs = [drop_seed_fields(config) for config in configs]
    group_names = []
    for row, config in zip(rows, comparable_configs, strict=True):
        others = [other for name, other in zip(rows, comparable_configs, strict=True) if name == row]
        fields = [name for name in config if any(other.get(name) != config[name] for other in others)]
        group_names.append(', '.join([row, *(f'{shorten_field_name(name, fields)} {format_config_value(config[name])}' for name in fields)]))
    return group_names


def shorten_field_name(name: str, names: list[str]) -> str:
    """The last part of a field's name, where no other one ends in it."""
    last_part = name.rpartition('.')[2]
    return last_part if [other.rpartition('.')[2] for other in names].count(last_part) == 1 else name


def format_config_value(value: object) -> str:
    return 'none' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)


def make_run_names(group_names: list[str], seeds: list[int | None], paths: list[Path]) -> list[str]:
    """Of each run: its arm, its seed where the arm has several runs, its folder where that is not enough."""
    labels = [
        group_name if group_names.count(group_name) == 1 or seed is None else f'{group_name}, seed {seed}'
        for group_name, seed in zip(group_names, seeds, strict=True)
    ]
    return [
        name if labels.count(name) == 1 else f'{name} ({format_relative_path(path, paths)})'
        for name, path in zip(labels, paths, strict=True)
    ]


def format_relative_path(path: Path, paths: Sequence[Path]) -> str:
    """A folder as seen from the one that all lie in."""
    try:
        return make_relative(make_absolute(path), find_common_folder([make_absolute(other).parent for other in paths]))
    except (UserError, ValueError):  # they lie in different buckets, or on different disks
        return str(path)
