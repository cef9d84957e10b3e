"""What is added to scaled scores, as a function of positions: no matrix before somebody asks for one."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativePositionBias:
    """b_ij of head h = function(parameters of h, max(position_i - position_j, 0)).

    The function is given P arrays _H11, one for each parameter, and distance_B1TS in float32; a kernel traces it
    with P scalars and a block of distances, if it is elementwise.
    """

    function: Callable[[Sequence[jax.Array], jax.Array], jax.Array] = dataclasses.field(metadata=dict(static=True))
    parameter_HP: jax.Array | np.ndarray
    is_elementwise: bool = dataclasses.field(default=True, metadata=dict(static=True))

    @property
    def is_learned(self) -> bool:
        return not isinstance(self.parameter_HP, np.ndarray)

    def __call__(self, query_BT: jax.Array | np.ndarray, key_BS: jax.Array | np.ndarray) -> jax.Array:
        """bias_BHTS, in float32."""
        distance_BTS = jnp.maximum(query_BT[:, :, None] - key_BS[:, None, :], 0)
        parameters = [jnp.asarray(parameter_H)[:, None, None] for parameter_H in self.parameter_HP.T]
        return jnp.asarray(self.function(parameters, distance_BTS[:, None].astype(jnp.float32)), jnp.float32)


@dataclasses.dataclass(frozen=True)
class ScoreBias:
    """A curve over the positions of queries and keys, and what columns have instead of one."""

    relative: RelativePositionBias | None = None
    query_position_BT: jax.Array | np.ndarray | None = None  # positions, wanted by a curve; B is 1 or the batch
    key_position_BS: jax.Array | np.ndarray | None = None  # of columns and text
    learned_HC: jax.Array | None = None  # scores of columns that stand nowhere; H may be 1

    def evaluate_learned(self, num_learned_kv: int) -> jax.Array | float:
        """bias_BHTC."""
        if self.learned_HC is not None:
            return self.learned_HC[None, :, None]
        return self.evaluate_relative(slice(num_learned_kv))

    def evaluate_relative(self, keys: slice) -> jax.Array | float:
        """Return bias_BHTS of some of the keys by the curve, or 0 without one."""
        if self.relative is None:
            return 0.0
        assert self.query_position_BT is not None, 'a curve needs the positions of queries'
        assert self.key_position_BS is not None, 'a curve needs the positions of keys'
        return self.relative(self.query_position_BT, self.key_position_BS[:, keys])

    def materialize(self, num_learned_kv: int, num_keys: int) -> jax.Array | float:
        """bias_BHTS of columns and so many keys of the text, left to right; any axis may be 1."""
        text_bias = self.evaluate_relative(slice(num_learned_kv, None))
        if not num_learned_kv or (self.relative is None and self.learned_HC is None):
            return text_bias
        learned_bias = self.evaluate_learned(num_learned_kv)
        shape = np.broadcast_shapes(jnp.shape(text_bias)[:-1] or (1, 1, 1), jnp.shape(learned_bias)[:-1])
        return jnp.concatenate(
            [jnp.broadcast_to(learned_bias, (*shape, num_learned_kv)), jnp.broadcast_to(text_bias, (*shape, num_keys))], -1
        )
