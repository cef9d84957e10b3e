"""What runs are called: by their row, what else they have otherwise, and their seed; by their folder at last."""

from collections.abc import Sequence
from pathlib import Path

from sinklab.files.place import absolute, common, relative
from sinklab.folder import FREE
from sinklab.record import Refusal

SEEDS = ('seed', 'data.seed')


def comparable(config: dict) -> dict:
    """What two seeds of one arm have alike."""
    return {name: value for name, value in config.items() if name not in SEEDS and not f'{name}.'.startswith(FREE)}


def arms(rows: list[str], configs: list[dict]) -> list[str]:
    """Of each run: its row, and where another run of the row differs by more than a seed, what it has there."""
    kept = [comparable(config) for config in configs]
    found = []
    for row, config in zip(rows, kept, strict=True):
        others = [other for name, other in zip(rows, kept, strict=True) if name == row]
        fields = [name for name in config if any(other.get(name) != config[name] for other in others)]
        found.append(', '.join([row, *(f'{short(name, fields)} {text(config[name])}' for name in fields)]))
    return found


def short(name: str, names: list[str]) -> str:
    """The last part of a field's name, where no other one ends in it."""
    end = name.rpartition('.')[2]
    return end if [one.rpartition('.')[2] for one in names].count(end) == 1 else name


def text(value: object) -> str:
    return 'none' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)


def names(arms: list[str], seeds: list[int | None], paths: list[Path]) -> list[str]:
    """Of each run: its arm, its seed where the arm has several runs, its folder where that is not enough."""
    told = [
        arm if arms.count(arm) == 1 or seed is None else f'{arm}, seed {seed}'
        for arm, seed in zip(arms, seeds, strict=True)
    ]
    return [
        name if told.count(name) == 1 else f'{name} ({way(path, paths)})'
        for name, path in zip(told, paths, strict=True)
    ]


def way(path: Path, paths: Sequence[Path]) -> str:
    """A folder as seen from the one that all lie in."""
    try:
        return relative(absolute(path), common([absolute(other).parent for other in paths]))
    except (Refusal, ValueError):  # they lie in different buckets, or on different disks
        return str(path)
