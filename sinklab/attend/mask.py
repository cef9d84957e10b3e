"""A mask is one interval of keys for each query; & is the intersection of intervals."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Mask:
    """Query t sees the keys start_T[t] <= s < end_T[t]."""

    start_T: jax.Array
    end_T: jax.Array

    def __and__(self, other: 'Mask') -> 'Mask':
        return Mask(jnp.maximum(self.start_T, other.start_T), jnp.minimum(self.end_T, other.end_T))

    def visible(self, keys: int) -> jax.Array:
        """bool_TS over `keys` keys."""
        key_S = jnp.arange(keys)
        return (self.start_T[:, None] <= key_S) & (key_S < self.end_T[:, None])


def causal(length: int) -> Mask:
    position_T = jnp.arange(length)
    return Mask(jnp.zeros_like(position_T), position_T + 1)
