"""Positions: what tells a query where a key stands. A position acts at one or more of the hooks below."""

import jax
import jax.numpy as jnp


class Position:
    """No position: every hook returns what it was given."""

    def rotate(self, query_BTHK: jax.Array, key_BTHK: jax.Array) -> tuple[jax.Array, jax.Array]:
        return query_BTHK, key_BTHK


class Rotary(Position):
    """RoPE (Su et al., 2021), half-split: dimensions i and i + K/2 turn by t * base^(-2i/K)."""

    base = 10_000.0

    def rotate(self, query_BTHK, key_BTHK):
        length, width = query_BTHK.shape[1], query_BTHK.shape[-1]
        frequency = self.base ** (-jnp.arange(0, width, 2) / width)
        angle = jnp.arange(length)[:, None] * frequency
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        return turn(query_BTHK, cos, sin), turn(key_BTHK, cos, sin)


def turn(x_BTHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    left, right = jnp.split(x_BTHK.astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x_BTHK.dtype)


POSITIONS = {'none': Position(), 'rotary': Rotary()}
