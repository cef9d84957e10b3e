"""What is added to scaled scores, as a function of positions: no matrix before somebody asks for one."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Curve:
    """b_ij of head h = function(parameters of h, max(position_i - position_j, 0)).

    The function is given P arrays _H11, one for each parameter, and distance_B1TS in float32; a kernel traces it
    with P scalars and a block of distances, if it is elementwise.
    """

    function: Callable[[Sequence[jax.Array], jax.Array], jax.Array] = dataclasses.field(metadata=dict(static=True))
    parameter_HP: jax.Array | np.ndarray
    elementwise: bool = dataclasses.field(default=True, metadata=dict(static=True))

    @property
    def learned(self) -> bool:
        return not isinstance(self.parameter_HP, np.ndarray)

    def __call__(self, query_BT: jax.Array | np.ndarray, key_BS: jax.Array | np.ndarray) -> jax.Array:
        """bias_BHTS, in float32."""
        distance_BTS = jnp.maximum(query_BT[:, :, None] - key_BS[:, None, :], 0)
        parameters = [jnp.asarray(one_H)[:, None, None] for one_H in self.parameter_HP.T]
        return jnp.asarray(self.function(parameters, distance_BTS[:, None].astype(jnp.float32)), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Bias:
    """A curve over the positions of queries and keys, and what columns have instead of one."""

    curve: Curve | None = None
    query_BT: jax.Array | np.ndarray | None = None  # positions, wanted by a curve; B is 1 or the batch
    key_BS: jax.Array | np.ndarray | None = None  # of columns and text
    column_HC: jax.Array | None = None  # scores of columns that stand nowhere; H may be 1

    def column(self, columns: int) -> jax.Array | float:
        """bias_BHTC."""
        if self.column_HC is not None:
            return self.column_HC[None, :, None]
        return self.evaluate_curve(slice(columns))

    def evaluate_curve(self, keys: slice) -> jax.Array | float:
        """Return bias_BHTS of some of the keys by the curve, or 0 without one."""
        if self.curve is None:
            return 0.0
        assert self.query_BT is not None, 'a curve needs the positions of queries'
        assert self.key_BS is not None, 'a curve needs the positions of keys'
        return self.curve(self.query_BT, self.key_BS[:, keys])

    def matrix(self, columns: int, keys: int) -> jax.Array | float:
        """bias_BHTS of columns and so many keys of the text, left to right; any axis may be 1."""
        text = self.evaluate_curve(slice(columns, None))
        if not columns or (self.curve is None and self.column_HC is None):
            return text
        column = self.column(columns)
        shape = np.broadcast_shapes(jnp.shape(text)[:-1] or (1, 1, 1), jnp.shape(column)[:-1])
        return jnp.concatenate(
            [jnp.broadcast_to(column, (*shape, columns)), jnp.broadcast_to(text, (*shape, keys))], -1
        )
