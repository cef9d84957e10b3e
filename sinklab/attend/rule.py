"""Everything about attention but its queries, keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.bias import ScoreBias
from sinklab.attend.mask import Mask
from sinklab.attend.operation import Operation

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Who gives how much to whom: every query sees the first `columns` keys, and through the mask the text."""

    operation: Operation
    mask: Mask
    num_learned_kv: int = 0
    bias: ScoreBias = dataclasses.field(default_factory=ScoreBias)

    def materialize_mask(self, num_keys: int) -> jax.Array:
        """bool_B1TS of the columns and so many keys of the text."""
        padding = (0, 0), (0, 0), (self.num_learned_kv, 0)
        return jnp.pad(self.mask.materialize(num_keys), padding, constant_values=True)[:, None]

    def materialize_bias(self, num_keys: int) -> jax.Array | float:
        """b_ij + offset of the same, as BHTS; any axis may be 1."""
        return self.bias.materialize(self.num_learned_kv, num_keys) + self.operation.offset

    def evaluate_learned_bias(self) -> jax.Array | float:
        """The same of the columns alone."""
        return self.bias.evaluate_learned(self.num_learned_kv) + self.operation.offset

    def slice_text(self, low: int, high: int) -> 'AttentionSpec':
        """Of the keys low..high of the text, and the columns; the mask stays as it is."""
        if self.bias.relative is None:
            return self
        assert self.bias.key_position_BS is not None, 'a curve needs the positions of keys'
        bias = dataclasses.replace(self.bias, key_BS=slice_keys(self.bias.key_position_BS, self.num_learned_kv, low, high))
        return dataclasses.replace(self, bias=bias)

    def truncate(self, length: int) -> 'AttentionSpec':
        """Of the first queries and keys of the text."""
        mask, query_BT = self.mask.truncate(length), self.bias.query_position_BT
        sliced = self.slice_text(0, mask.num_keys)
        bias = dataclasses.replace(sliced.bias, query_BT=None if query_BT is None else query_BT[:, :length])
        return dataclasses.replace(sliced, mask=mask, bias=bias)


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """A rule, and what else decides whether a backend can."""

    spec: AttentionSpec
    heads: int
    width: int
    value_width: int
    dtype: str

    @property
    def num_queries(self) -> int:
        return self.spec.mask.num_queries


def slice_keys(array_BS: Array, num_learned_kv: int, low: int, high: int) -> Array:
    """The columns, and the keys low..high of the text, along the second axis."""
    text = array_BS[:, num_learned_kv + low : num_learned_kv + high]
    return jnp.concatenate([array_BS[:, :num_learned_kv], text], 1) if num_learned_kv else text
