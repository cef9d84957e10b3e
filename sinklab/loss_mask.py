"""Loss mask: ids of tokens that are read but not predicted are stored as their complement."""

from typing import Any, TypeVar

Ids = TypeVar('Ids', bound=Any)  # NumPy or JAX arrays


def exclude_from_loss(ids: Ids) -> Ids:
    return ~ids


def is_in_loss(ids: Ids) -> Ids:
    return ids >= 0


def strip_loss_mask(ids: Ids) -> Ids:
    """Return the ids as a model reads them, without the loss mask."""
    return ids.__array_namespace__().where(ids < 0, ~ids, ids)
