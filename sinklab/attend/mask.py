"""A mask is one interval of keys for each query; & is the intersection of intervals."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Mask:
    """Query t sees the keys start[t] <= s < end[t]; the leading axis is the batch, or 1 for all of it."""

    start_BT: jax.Array
    end_BT: jax.Array

    def __and__(self, other: 'Mask') -> 'Mask':
        return Mask(jnp.maximum(self.start_BT, other.start_BT), jnp.minimum(self.end_BT, other.end_BT))

    def visible(self, keys: int) -> jax.Array:
        """bool_BTS over `keys` keys."""
        key_S = jnp.arange(keys)
        return (self.start_BT[..., None] <= key_S) & (key_S < self.end_BT[..., None])

    def after(self, queries: int) -> 'Mask':
        """The mask with so many queries before the first, which see no key."""
        pad = lambda x: jnp.pad(x, ((0, 0), (queries, 0)))  # noqa: E731
        return Mask(pad(self.start_BT), pad(self.end_BT))


def queries(length: int) -> jax.Array:
    return jnp.arange(length)[None]


def causal(length: int) -> Mask:
    return Mask(jnp.zeros_like(queries(length)), queries(length) + 1)


def prefix(length: int, tokens: int) -> Mask:
    """Causal, and the first `tokens` are seen by all."""
    return Mask(jnp.zeros_like(queries(length)), jnp.maximum(queries(length) + 1, tokens))


def window(length: int, keys: int) -> Mask:
    """The `keys` keys that end with the query's own: the paper's shifted window."""
    return Mask(jnp.maximum(queries(length) - keys + 1, 0), jnp.full((1, length), length))


def block(length: int, keys: int) -> Mask:
    """The query's own block, of those that cut the sequence every `keys` keys."""
    start = queries(length) // keys * keys
    return Mask(start, jnp.minimum(start + keys, length))


def document(start_BT: jax.Array) -> Mask:
    """Nothing before the start of the query's document."""
    return Mask(start_BT, jnp.full_like(start_BT, start_BT.shape[-1]))
