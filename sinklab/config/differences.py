"""Differences between configs."""

from typing import Any


def flatten_dict(tree: dict, prefix: str = '') -> dict[str, Any]:
    """Flatten a nested dict to dotted keys: {'a': {'b': 1}} becomes {'a.b': 1}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value
        for name, subtree in tree.items()
        for key, value in flatten_dict(subtree, f'{prefix}.{name}'.strip('.')).items()
    }


def format_differences(old: dict, new: dict) -> list[str]:
    return [f'{key} {old.get(key)} -> {new.get(key)}' for key in new | old if old.get(key) != new.get(key)]
