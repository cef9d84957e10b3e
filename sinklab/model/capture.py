"""What a probe wants to see of a forward pass, returned by every block; scanning the layers stacks L in front."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Capture:
    attention_BHTS: jax.Array | None = None  # float32, before any proxy normalization
    residual_BTD: jax.Array | None = None  # after the block
