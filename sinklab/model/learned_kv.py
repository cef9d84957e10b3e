"""Learned keys and values before the text (the attention biases of Table 3), and the sink token.

Learned keys are never masked. The key of a sink token is rotated as keys of the text are, and other learned keys are
not. In an attention matrix of `Intermediates`, the first token has the key index `count_learned_kv(model)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab.config import spec
from sinklab.model.layers import INITIALIZATIONS, make_normal_param
from sinklab.parallel.param_einsum import all_gather_param, broadcast_and_cast

INIT_STD = 0.02  # as in the released code


class PrependedTokens(nnx.Module):
    """Tokens that are prepended to the text; this base class has none."""

    num_tokens = 0

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        pass

    def prepend(self, x_BTD: jax.Array) -> jax.Array:
        """Prepend the token to the residual stream."""
        return x_BTD

    @classmethod
    def shift_positions(cls, position_BT: jax.Array) -> jax.Array:
        """Return the positions of prepended tokens and text, given those of the text."""
        xp = np if isinstance(position_BT, np.ndarray) else jnp
        return xp.pad(position_BT + cls.num_tokens, ((0, 0), (cls.num_tokens, 0)))


class SinkToken(PrependedTokens):
    """A learned token before the text, at position 0; it has a position encoding and is also a query."""

    num_tokens = 1

    def __init__(self, model, rngs):
        std = INITIALIZATIONS[model.initialization].embedding(model, model.width)
        self.vector_TD = make_normal_param(rngs, (self.num_tokens, model.width), std, (None, 'embed'), inputs=None)

    def prepend(self, x_BTD):
        sink_BTD = broadcast_and_cast(
            all_gather_param(self.vector_TD), (len(x_BTD), self.num_tokens, x_BTD.shape[-1]), x_BTD.dtype
        )
        return jnp.concatenate([sink_BTD, x_BTD], 1)


class LearnedKV(nnx.Module):
    """Learned keys and values before those of the text; this base class has none."""

    num_keys = 0
    tokens_class = PrependedTokens  # tokens that are prepended to the sequence

    def __init__(self, model: spec.ModelConfig, value_width: int, rngs: nnx.Rngs):
        pass

    def prepend(self, key_BSHK: jax.Array, value_BSHK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Prepend learned keys and values to those of the text."""
        return key_BSHK, value_BSHK

    def get_score_bias_HC(self) -> jax.Array | None:
        """Return the bias of the scores of learned keys without a position; None if they have positions."""
        return None

    def add_value(self, output_BTHK: jax.Array) -> jax.Array:
        """Add a learned value to the outputs of heads (V bias)."""
        return output_BTHK


class SinkTokenKV(LearnedKV):
    """Key and value of a sink token, which the sequence already contains."""

    num_keys = 1
    tokens_class = SinkToken


class LearnedKey(LearnedKV):
    """K bias: a learned key with a fixed value, which is zero, m e_1, or m (1, ..., 1) / sqrt(K)."""

    num_keys = 1

    def __init__(self, model, value_width, rngs):
        self.key_HK = make_vector_param(model, model.learned_kv.key_width or model.head_width, rngs)
        self.direction = VALUE_DIRECTIONS[model.learned_kv.value]
        self.value_norm = model.learned_kv.value_norm or 0.0

    def prepend(self, key_BSHK, value_BSHK):
        value_HK = self.value_norm * self.direction(value_BSHK.shape[-1])[None]
        return prepend_vector(self.key_HK[...], key_BSHK), prepend_vector(value_HK, value_BSHK)

    def get_score_bias_HC(self):
        return jnp.zeros((1, 1))


class LearnedKeyValue(LearnedKey):
    """KV bias: a learned key with a learned value."""

    def __init__(self, model, value_width, rngs):
        self.key_HK = make_vector_param(model, model.learned_kv.key_width or model.head_width, rngs)
        self.value_HK = make_vector_param(model, value_width, rngs)

    def prepend(self, key_BSHK, value_BSHK):
        return prepend_vector(self.key_HK[...], key_BSHK), prepend_vector(self.value_HK[...], value_BSHK)


class LearnedLogit(LearnedKV):
    """A learned logit in addition to the scores of keys, without a value (gpt-oss)."""

    num_keys = 1

    def __init__(self, model, value_width, rngs):
        self.score_H = make_vector_param(model, 1, rngs)
        self.heads = model.heads

    def prepend(self, key_BSHK, value_BSHK):
        zero_HK = jnp.zeros((1, 1))
        return prepend_vector(zero_HK, key_BSHK), prepend_vector(zero_HK, value_BSHK)

    def get_score_bias_HC(self):
        return jnp.broadcast_to(self.score_H[...], (self.heads, 1))


class LearnedValue(LearnedKV):
    """V bias: a learned vector that is added to the output of each head."""

    def __init__(self, model, value_width, rngs):
        self.value_HK = make_vector_param(model, value_width, rngs)

    def add_value(self, output_BTHK):
        return output_BTHK + broadcast_and_cast(self.value_HK[...], output_BTHK.shape, output_BTHK.dtype)


def make_vector_param(model: spec.ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.Param:
    """Make a learned vector for each head, or one for all heads."""
    num_vectors, head_axis = (1, None) if model.learned_kv.shared else (model.heads, 'heads')
    return make_normal_param(rngs, (num_vectors, width), INIT_STD, (head_axis, None), inputs=None)


def prepend_vector(vector_HK: jax.Array, text_BSHK: jax.Array) -> jax.Array:
    """Prepend a vector, padded with zeros to their width, to the keys or values of the text."""
    batch, _, heads, width = text_BSHK.shape
    vector_HK = jnp.pad(vector_HK, ((0, 0), (0, width - vector_HK.shape[-1])))
    return jnp.concatenate([broadcast_and_cast(vector_HK, (batch, 1, heads, width), text_BSHK.dtype), text_BSHK], 1)


VALUE_DIRECTIONS = {
    'zero': jnp.zeros,
    'first': lambda width: jnp.zeros(width).at[0].set(1.0),
    'uniform': lambda width: jnp.full(width, width**-0.5),
}
LEARNED_KV_KINDS = {
    'none': LearnedKV,
    'sink_token': SinkTokenKV,
    'k': LearnedKey,
    'kv': LearnedKeyValue,
    'v': LearnedValue,
    'logit': LearnedLogit,
}


def count_learned_kv(model: spec.ModelConfig) -> int:
    return LEARNED_KV_KINDS[model.learned_kv.kind].num_keys
