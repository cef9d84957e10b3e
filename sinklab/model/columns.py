"""Columns: keys and values left of the text that every query sees (the attention biases of Table 3).

They are never rotated and never part of a mask. Whoever reads a captured matrix finds the first token at column
number `count(model)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import spec
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.parameter import spread, whole

DEVIATION = 0.02  # of the released code


class Token(nnx.Module):
    """Nothing comes with the sequence but its text."""

    count = 0

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        pass

    def attach(self, x_BTD: jax.Array) -> jax.Array:
        """The stream, with the token at its left."""
        return x_BTD

    @classmethod
    def positions(cls, position_BT: jax.Array) -> jax.Array:
        """Those of token and text, from those of the text."""
        module = np if isinstance(position_BT, np.ndarray) else jnp
        return module.pad(position_BT + cls.count, ((0, 0), (cls.count, 0)))


class SinkToken(Token):
    """A learned token before the text, at position 0: it is embedded, rotated, and asks."""

    count = 1

    def __init__(self, model, rngs):
        std = INITIALIZATIONS[model.initialization].embedding(model, model.width)
        self.vector_TD = normal(rngs, (self.count, model.width), std, (None, 'embed'), inputs=None)

    def attach(self, x_BTD):
        sink_BTD = spread(whole(self.vector_TD), (len(x_BTD), self.count, x_BTD.shape[-1]), x_BTD.dtype)
        return jnp.concatenate([sink_BTD, x_BTD], 1)


class Columns(nnx.Module):
    """No column."""

    count = 0
    token = Token  # what of them comes with the sequence

    def __init__(self, model: spec.Model, value_width: int, rngs: nnx.Rngs):
        pass

    def attach(self, key_BSHK: jax.Array, value_BSHK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values of the text, with those of the columns left of them."""
        return key_BSHK, value_BSHK

    def score_HC(self) -> jax.Array | None:
        """What is added to the scores of columns that stand nowhere; None: they have positions, as text has."""
        return None

    def add(self, output_BTHK: jax.Array) -> jax.Array:
        """V bias acts here, on what heads have aggregated."""
        return output_BTHK


class OfSinkToken(Columns):
    """The sink token's own column, which comes with the keys and values of the sequence."""

    count, token = 1, SinkToken


class Key(Columns):
    """K bias: a learned key whose value is fixed: zero, m e_1, or m (1, ..., 1) / sqrt(K)."""

    count = 1

    def __init__(self, model, value_width, rngs):
        self.key_HK = vector(model, model.columns.key_width or model.head_width, rngs)
        self.direction, self.norm = DIRECTIONS[model.columns.value], model.columns.value_norm or 0.0

    def attach(self, key_BSHK, value_BSHK):
        value_HK = self.norm * self.direction(value_BSHK.shape[-1])[None]
        return before(self.key_HK[...], key_BSHK), before(value_HK, value_BSHK)

    def score_HC(self):
        return jnp.zeros((1, 1))


class KeyValue(Columns):
    """KV bias: a learned key with a learned value."""

    count = 1

    def __init__(self, model, value_width, rngs):
        self.key_HK = vector(model, model.columns.key_width or model.head_width, rngs)
        self.value_HK = vector(model, value_width, rngs)

    def attach(self, key_BSHK, value_BSHK):
        return before(self.key_HK[...], key_BSHK), before(self.value_HK[...], value_BSHK)

    def score_HC(self):
        return jnp.zeros((1, 1))


class Logit(Columns):
    """A learned score of its own, beside those of the keys, with no value (gpt-oss)."""

    count = 1

    def __init__(self, model, value_width, rngs):
        self.score_H, self.heads = vector(model, 1, rngs), model.heads

    def attach(self, key_BSHK, value_BSHK):
        nothing_HK = jnp.zeros((1, 1))
        return before(nothing_HK, key_BSHK), before(nothing_HK, value_BSHK)

    def score_HC(self):
        return jnp.broadcast_to(self.score_H[...], (self.heads, 1))


class Value(Columns):
    """V bias: a learned vector, added to what each head has aggregated."""

    def __init__(self, model, value_width, rngs):
        self.value_HK = vector(model, value_width, rngs)

    def add(self, output_BTHK):
        return output_BTHK + spread(self.value_HK[...], output_BTHK.shape, output_BTHK.dtype)


def vector(model: spec.Model, width: int, rngs: nnx.Rngs) -> nnx.Param:
    """One vector a head, or one for all of them."""
    heads, axis = (1, None) if model.columns.shared else (model.heads, 'heads')
    return normal(rngs, (heads, width), DEVIATION, (axis, None), inputs=None)


def before(column_HK: jax.Array, text_BSHK: jax.Array) -> jax.Array:
    """The text with a column left of it, whose missing dimensions are 0."""
    batch, _, heads, width = text_BSHK.shape
    column_HK = jnp.pad(column_HK, ((0, 0), (0, width - column_HK.shape[-1])))
    return jnp.concatenate([spread(column_HK, (batch, 1, heads, width), text_BSHK.dtype), text_BSHK], 1)


def first(width: int) -> jax.Array:
    return jnp.zeros(width).at[0].set(1.0)


def uniform(width: int) -> jax.Array:
    return jnp.full(width, width**-0.5)


DIRECTIONS = {'zero': jnp.zeros, 'first': first, 'uniform': uniform}
COLUMNS = {
    'none': Columns,
    'sink_token': OfSinkToken,
    'k': Key,
    'kv': KeyValue,
    'v': Value,
    'logit': Logit,
}


def count(model: spec.Model) -> int:
    return COLUMNS[model.columns.kind].count
