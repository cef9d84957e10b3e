"""What a probe wants to see of a forward pass, returned by every block; scanning the layers stacks L in front."""

import dataclasses

import jax

from sinklab.attend.received import Received


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Capture:
    attention_BHTS: jax.Array | None = None  # float32, before any proxy normalization; columns left of the text
    residual_BTD: jax.Array | None = None  # the stream after the block, before a norm that joins it
    received: Received | None = None  # by columns and first keys, from the queries of the text
    columns: int = dataclasses.field(default=0, metadata=dict(static=True))  # the first token is this number along S

    def of_text(self, first: int, columns: int) -> 'Capture':
        """Without the `first` queries, which are no text; its keys that are none are `columns` in number."""

        def text(array_TX):
            return None if array_TX is None else array_TX[..., first:, :]

        return Capture(text(self.attention_BHTS), text(self.residual_BTD), self.received, columns)
