"""A mask is one interval of keys for each query; & is the intersection of intervals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab import spec


@dataclasses.dataclass(frozen=True)
class Mask:
    """Query t sees the keys start[t] <= s < end[t]; the leading axis is the batch, or 1 for all of it.

    `hull` is known before anything is traced: for each query the start and end of an interval that holds its own.
    """

    start_BT: jax.Array | np.ndarray
    end_BT: jax.Array | np.ndarray
    hull_2T: np.ndarray

    def __and__(self, other: 'Mask') -> 'Mask':
        start, end = np.maximum(self.hull_2T[0], other.hull_2T[0]), np.minimum(self.hull_2T[1], other.hull_2T[1])
        if self.static and other.static:
            return static(start, end)
        start_BT = jnp.maximum(self.start_BT, other.start_BT)
        return Mask(start_BT, jnp.minimum(self.end_BT, other.end_BT), np.stack([start, end]))

    @property
    def static(self) -> bool:
        return isinstance(self.start_BT, np.ndarray)

    @property
    def length(self) -> int:
        return int(self.hull_2T.shape[1])

    @property
    def keys(self) -> int:
        """How many keys there are, if some query may see the last."""
        return int(self.hull_2T[1].max())

    def visible(self, keys: int) -> jax.Array:
        """bool_BTS over `keys` keys."""
        key_S = jnp.arange(keys)
        return jnp.asarray((self.start_BT[..., None] <= key_S) & (key_S < self.end_BT[..., None]))

    def pad(self, before: int = 0, after: int = 0) -> 'Mask':
        """The mask with so many queries before the first and after the last, which see no key."""
        module, width = np if self.static else jnp, ((0, 0), (before, after))
        start_BT, end_BT = (module.pad(edge_BT, width) for edge_BT in (self.start_BT, self.end_BT))
        return Mask(start_BT, end_BT, np.pad(self.hull_2T, width))

    def first(self, length: int) -> 'Mask':
        """Of the first queries and keys."""
        module = np if self.static else jnp
        start_BT, end_BT = self.start_BT[:, :length], module.minimum(self.end_BT[:, :length], length)
        return Mask(start_BT, end_BT, np.minimum(self.hull_2T[:, :length], length))


def static(start_T: np.ndarray, end_T: np.ndarray) -> Mask:
    """The same intervals for every sequence, known before anything is traced."""
    return Mask(start_T[None], end_T[None], np.stack([start_T, end_T]))


def queries(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


def full(length: int) -> Mask:
    return static(np.zeros_like(queries(length)), np.full_like(queries(length), length))


def causal(length: int) -> Mask:
    return prefix(length, 1)


def prefix(length: int, tokens: int) -> Mask:
    """Causal, and the first `tokens` are seen by all."""
    return static(np.zeros_like(queries(length)), np.minimum(np.maximum(queries(length) + 1, tokens), length))


def window(length: int, keys: int) -> Mask:
    """The `keys` keys that end with the query's own: the paper's shifted window."""
    return static(np.maximum(queries(length) - keys + 1, 0), np.full_like(queries(length), length))


def block(length: int, keys: int) -> Mask:
    """The query's own block, of those that cut the sequence every `keys` keys."""
    start = queries(length) // keys * keys
    return static(start, np.minimum(start + keys, length))


def document(start_BT: jax.Array) -> Mask:
    """Nothing before the start of the query's document."""
    length = start_BT.shape[-1]
    return unknown(start_BT, jnp.full_like(start_BT, length), length)


def unknown(start_BT: jax.Array, end_BT: jax.Array, keys: int) -> Mask:
    """Intervals of which nothing is known before they are traced."""
    hull_2T = np.broadcast_to(np.array([[0], [keys]], np.int32), (2, start_BT.shape[-1]))
    return Mask(start_BT, end_BT, hull_2T)


def mask_of(mask: spec.Mask, length: int, start_BT: jax.Array | None = None) -> Mask:
    """What a spec shows of so many tokens; start_BT is where the document of each begins, wanted by `document`."""
    seen = prefix(length, mask.prefix or 1)
    if mask.window:
        seen &= window(length, mask.window)
    if mask.block:
        seen &= block(length, mask.block)
    if mask.document:
        assert start_BT is not None, "a mask of documents needs the start of each token's document"
        seen &= document(start_BT)
    return seen
