"""Everything about attention but its queries, keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.bias import Bias
from sinklab.attend.mask import Mask
from sinklab.attend.operation import Operation

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Rule:
    """Who gives how much to whom: every query sees the first `columns` keys, and through the mask the text."""

    operation: Operation
    mask: Mask
    columns: int = 0
    bias: Bias = dataclasses.field(default_factory=Bias)

    def visible(self, keys: int) -> jax.Array:
        """bool_B1TS of the columns and so many keys of the text."""
        columns = (0, 0), (0, 0), (self.columns, 0)
        return jnp.pad(self.mask.visible(keys), columns, constant_values=True)[:, None]

    def score_bias(self, keys: int) -> jax.Array | float:
        """b_ij + offset of the same, as BHTS; any axis may be 1."""
        return self.bias.matrix(self.columns, keys) + self.operation.offset

    def column_bias(self) -> jax.Array | float:
        """The same of the columns alone."""
        return self.bias.column(self.columns) + self.operation.offset

    def cut(self, low: int, high: int) -> 'Rule':
        """Of the keys low..high of the text, and the columns; the mask stays as it is."""
        if self.bias.curve is None:
            return self
        assert self.bias.key_BS is not None, 'a curve needs the positions of keys'
        bias = dataclasses.replace(self.bias, key_BS=part(self.bias.key_BS, self.columns, low, high))
        return dataclasses.replace(self, bias=bias)

    def first(self, length: int) -> 'Rule':
        """Of the first queries and keys of the text."""
        mask, query_BT = self.mask.first(length), self.bias.query_BT
        cut = self.cut(0, mask.keys)
        bias = dataclasses.replace(cut.bias, query_BT=None if query_BT is None else query_BT[:, :length])
        return dataclasses.replace(cut, mask=mask, bias=bias)


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule, and what else decides whether a backend can."""

    rule: Rule
    heads: int
    width: int
    value_width: int
    dtype: str

    @property
    def length(self) -> int:
        return self.rule.mask.length


def part(array_BS: Array, columns: int, low: int, high: int) -> Array:
    """The columns, and the keys low..high of the text, along the second axis."""
    text = array_BS[:, columns + low : columns + high]
    return jnp.concatenate([array_BS[:, :columns], text], 1) if columns else text
