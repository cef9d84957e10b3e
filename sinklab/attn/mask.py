"""Attention masks: one interval of keys per query, combined by intersection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.config import spec


@dataclasses.dataclass(frozen=True)
class Mask:
    """An interval of keys for each query: query t sees the keys start[t] <= s < end[t].

    The leading axis of `start_BT` and `end_BT` is the batch, or 1 if all sequences have the same mask. `bounds_2T` is
    static (known before tracing): for each query, the start and end of an interval that contains the query's interval
    in every sequence.
    """

    start_BT: jax.Array | np.ndarray
    end_BT: jax.Array | np.ndarray
    bounds_2T: np.ndarray

    def __and__(self, other: 'Mask') -> 'Mask':
        start = np.maximum(self.bounds_2T[0], other.bounds_2T[0])
        end = np.minimum(self.bounds_2T[1], other.bounds_2T[1])
        if self.is_static and other.is_static:
            return make_static_mask(start, end)
        start_BT = jnp.maximum(self.start_BT, other.start_BT)
        return Mask(start_BT, jnp.minimum(self.end_BT, other.end_BT), np.stack([start, end]))

    @property
    def is_static(self) -> bool:
        return isinstance(self.start_BT, np.ndarray)

    @property
    def num_queries(self) -> int:
        return int(self.bounds_2T.shape[1])

    def materialize(self, num_keys: int) -> jax.Array:
        """Return the mask as bool_BTS, over `num_keys` keys."""
        key_S = jnp.arange(num_keys)
        return jnp.asarray((self.start_BT[..., None] <= key_S) & (key_S < self.end_BT[..., None]))

    def pad(self, before: int = 0, after: int = 0) -> 'Mask':
        """Add queries before the first and after the last, which see no key."""
        xp = np if self.is_static else jnp
        width = ((0, 0), (before, after))
        start_BT, end_BT = (xp.pad(edge_BT, width) for edge_BT in (self.start_BT, self.end_BT))
        return Mask(start_BT, end_BT, np.pad(self.bounds_2T, width))


def make_static_mask(start_T: np.ndarray, end_T: np.ndarray) -> Mask:
    """Make a static mask, with the same intervals for every sequence."""
    return Mask(start_T[None], end_T[None], np.stack([start_T, end_T]))


def make_interval_mask(length: int, start: np.ndarray | int, end: np.ndarray | int) -> Mask:
    """Make a static mask of intervals that are clipped to `length` keys."""
    start_T, end_T = (np.full(length, np.clip(edge, 0, length), np.int32) for edge in (start, end))
    return make_static_mask(start_T, end_T)


def make_full_mask(length: int) -> Mask:
    return make_interval_mask(length, 0, length)


def make_causal_mask(length: int) -> Mask:
    return make_prefix_mask(length, 1)


def make_prefix_mask(length: int, num_tokens: int) -> Mask:
    """Make a causal mask under which every query also sees the first `num_tokens` keys."""
    return make_interval_mask(length, 0, np.maximum(np.arange(length) + 1, num_tokens))


def make_window_mask(length: int, window_size: int) -> Mask:
    """Make a mask that hides keys more than `window_size` - 1 before the query (the paper's shifted window).

    Keys after the query stay visible: the mask is not causal.
    """
    return make_interval_mask(length, np.arange(length) - window_size + 1, length)


def make_block_mask(length: int, block_size: int) -> Mask:
    """Make a mask under which a query sees its own block of `block_size` keys."""
    start_T = np.arange(length) // block_size * block_size
    return make_interval_mask(length, start_T, start_T + block_size)


def make_document_mask(start_BT: jax.Array) -> Mask:
    """Make a mask that hides the keys before the start of the query's document."""
    length = start_BT.shape[-1]
    return make_traced_mask(start_BT, jnp.full_like(start_BT, length), length)


def make_traced_mask(start_BT: jax.Array, end_BT: jax.Array, num_keys: int) -> Mask:
    """Make a mask from traced intervals; its static bounds contain all keys."""
    bounds_2T = np.broadcast_to(np.array([[0], [num_keys]], np.int32), (2, start_BT.shape[-1]))
    return Mask(start_BT, end_BT, bounds_2T)


def resolve_mask(mask_spec: spec.MaskConfig, length: int, start_BT: jax.Array | None = None) -> Mask:
    """Return the mask of a config for `length` tokens.

    Args:
        mask_spec: The `model.mask` of a config.
        length: Number of tokens.
        start_BT: Index at which the document of each token starts; needed for a document mask only.
    """
    intersection = make_prefix_mask(length, mask_spec.prefix or 1)
    if mask_spec.window:
        intersection &= make_window_mask(length, mask_spec.window)
    if mask_spec.block:
        intersection &= make_block_mask(length, mask_spec.block)
    if mask_spec.document:
        assert start_BT is not None, "a mask of documents needs the start of each token's document"
        intersection &= make_document_mask(start_BT)
    return intersection
