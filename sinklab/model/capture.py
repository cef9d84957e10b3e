"""What a probe wants to see of a forward pass, returned by every block; scanning the layers stacks L in front."""

import dataclasses

import jax

from sinklab.attend.received import KeyMass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intermediates:
    attention_BHTS: jax.Array | None = None  # float32, before any proxy normalization; columns left of the text
    query_BTHK: jax.Array | None = None  # as they ask
    key_BSHK: jax.Array | None = None  # as attended, columns left of the text, as all of S
    value_BSHK: jax.Array | None = None
    head_BTHK: jax.Array | None = None  # sum_j A_ij v_j, before what is added, normed or gated
    normed_BTD: jax.Array | None = None  # what attention reads of the stream, after its norm
    residual_BTD: jax.Array | None = None  # the stream after the block, before a norm that joins it
    sink_BCD: jax.Array | None = None  # that of sink tokens
    key_mass: KeyMass | None = None  # by columns and first keys, from the queries of the text
    row_means: dict[str, jax.Array] | None = None  # _BH, over the queries of the text

    def slice_text(self, num_dropped: int) -> 'Intermediates':
        """Without the `first` queries, which are no text."""

        def slice_queries(array: jax.Array | None, axis: int) -> jax.Array | None:
            return None if array is None else jax.lax.slice_in_dim(array, num_dropped, None, axis=axis)

        return dataclasses.replace(
            self,
            attention_BHTS=slice_queries(self.attention_BHTS, -2),
            query_BTHK=slice_queries(self.query_BTHK, -3),
            head_BTHK=slice_queries(self.head_BTHK, -3),
            normed_BTD=slice_queries(self.normed_BTD, -2),
            residual_BTD=slice_queries(self.residual_BTD, -2),
            sink_BCD=None if self.residual_BTD is None or not num_dropped else self.residual_BTD[..., :num_dropped, :],
        )
