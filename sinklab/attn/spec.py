"""Attention specs: operation, mask, learned keys and score bias, without queries, keys and values."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attn.mask import Mask
from sinklab.attn.operations import Operation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativePositionBias:
    """Relative position bias b_ij = function(parameters of the head, max(position_i - position_j, 0)).

    The function receives P arrays _H11, one for each parameter, and distance_BHTS in float32, where H is 1 if heads
    have the same positions. If it is elementwise, kernels trace it with P scalars and a block of distances.
    """

    function: Callable[[Sequence[jax.Array], jax.Array], jax.Array] = dataclasses.field(metadata=dict(static=True))
    parameter_HP: jax.Array | np.ndarray
    is_elementwise: bool = dataclasses.field(default=True, metadata=dict(static=True))

    @property
    def is_learned(self) -> bool:
        return not isinstance(self.parameter_HP, np.ndarray)

    def __call__(self, query_BTH: jax.Array | np.ndarray, key_BSH: jax.Array | np.ndarray) -> jax.Array:
        """Return bias_BHTS in float32."""
        distance_BTSH = jnp.maximum(query_BTH[:, :, None] - key_BSH[:, None], 0)
        parameters = [jnp.asarray(parameter_H)[:, None, None] for parameter_H in self.parameter_HP.T]
        distance_BHTS = jnp.moveaxis(distance_BTSH, -1, 1).astype(jnp.float32)
        return jnp.asarray(self.function(parameters, distance_BHTS), jnp.float32)


@dataclasses.dataclass(frozen=True)
class ScoreBias:
    """The bias of scores: a function of relative positions, and learned biases of learned keys."""

    relative: RelativePositionBias | None = None
    # Positions, needed by `relative`: B is 1 or the batch, and H is 1 if heads have the same.
    query_position_BTH: jax.Array | np.ndarray | None = None
    key_position_BSH: jax.Array | np.ndarray | None = None  # of learned keys and text
    learned_HC: jax.Array | None = None  # biases of learned keys without a position; H may be 1

    def evaluate_learned(self, num_learned_kv: int) -> jax.Array | float:
        """Return the bias of learned keys, as bias_BHTC."""
        if self.learned_HC is not None:
            return self.learned_HC[None, :, None]
        return self.evaluate_relative(slice(num_learned_kv))

    def evaluate_relative(self, keys: slice) -> jax.Array | float:
        """Return the relative position bias_BHTS of a slice of keys, or 0 without `relative`."""
        if self.relative is None:
            return 0.0
        assert self.query_position_BTH is not None, 'a relative bias needs the positions of queries'
        assert self.key_position_BSH is not None, 'a relative bias needs the positions of keys'
        return self.relative(self.query_position_BTH, self.key_position_BSH[:, keys])

    def materialize(self, num_learned_kv: int, num_keys: int) -> jax.Array | float:
        """Return bias_BHTS of learned keys, then `num_keys` keys of the text; any axis may be 1."""
        text_bias = self.evaluate_relative(slice(num_learned_kv, None))
        if not num_learned_kv or (self.relative is None and self.learned_HC is None):
            return text_bias
        learned_bias = self.evaluate_learned(num_learned_kv)
        shape = np.broadcast_shapes(jnp.shape(text_bias)[:-1] or (1, 1, 1), jnp.shape(learned_bias)[:-1])
        return jnp.concatenate(
            [
                jnp.broadcast_to(learned_bias, (*shape, num_learned_kv)),
                jnp.broadcast_to(text_bias, (*shape, num_keys)),
            ],
            -1,
        )


Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Attention specification: each query sees the first `num_learned_kv` keys, and text through `mask`."""

    operation: Operation
    mask: Mask
    num_learned_kv: int = 0
    bias: ScoreBias = dataclasses.field(default_factory=ScoreBias)
    needs_abs_weight_sum: bool = False  # otherwise `RowStats.abs_weight_sum_BHT` is undefined

    def materialize_mask(self, num_keys: int) -> jax.Array:
        """Return bool_B1TS of learned keys and `num_keys` keys of the text."""
        padding = (0, 0), (0, 0), (self.num_learned_kv, 0)
        return jnp.pad(self.mask.materialize(num_keys), padding, constant_values=True)[:, None]

    def materialize_bias(self, num_keys: int) -> jax.Array | float:
        """Return b_ij + offset of learned keys and `num_keys` keys of the text, as BHTS; any axis may be 1."""
        return self.bias.materialize(self.num_learned_kv, num_keys) + self.operation.offset

    def slice_text(self, low: int, high: int) -> 'AttentionSpec':
        """Return the spec of learned keys and the keys low..high of the text; the mask stays as it is."""
        if self.bias.relative is None:
            return self
        assert self.bias.key_position_BSH is not None, 'a relative bias needs the positions of keys'
        bias = dataclasses.replace(
            self.bias, key_position_BSH=slice_keys(self.bias.key_position_BSH, self.num_learned_kv, low, high)
        )
        return dataclasses.replace(self, bias=bias)


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """An attention spec with the sizes and the dtype that decide whether a backend supports it."""

    spec: AttentionSpec
    heads: int
    width: int
    value_width: int
    dtype: str
    kv_heads: int | None = None  # heads of keys and values; None: as many as `heads`
    smaller: 'AttentionProblem | None' = None  # one of the same kind, with which backends are verified

    @property
    def num_queries(self) -> int:
        return self.spec.mask.num_queries


def slice_keys(array_BS: Array, num_learned_kv: int, low: int, high: int) -> Array:
    """Return learned keys and the keys low..high of the text, along the second axis."""
    text = array_BS[:, num_learned_kv + low : num_learned_kv + high]
    return jnp.concatenate([array_BS[:, :num_learned_kv], text], 1) if num_learned_kv else text
