import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import spec
from sinklab.attend.mask import causal
from sinklab.model.block import Block
from sinklab.model.capture import Capture
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.norm import RMSNorm
from sinklab.sharding import place


class Transformer(nnx.Module):
    """LLaMA-style decoder: pre-norm blocks, scanned; untied embedding and head; no biases, no dropout."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(model.dtype)
        std = INITIALIZATIONS[model.initialization].linear(model, model.width)
        table = (model.vocabulary, model.width), std
        self.embedding_VD = normal(rngs, *table, ('vocabulary', 'embed'))

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs)

        self.blocks = stack(rngs)
        self.norm = RMSNorm(model.width, model.norm_epsilon)
        self.head_VD = normal(rngs, *table, ('vocabulary', 'embed'))

    def hidden(self, token_BT: jax.Array, *, capture: bool = False, remat: bool = False):
        """(hidden_BTD after the last norm, Capture with a leading L; empty unless asked for)."""
        mask = causal(token_BT.shape[1])
        block = lambda x_BTD, block: block(x_BTD, mask, capture)  # noqa: E731
        x_BTD = place(self.embedding_VD[...].astype(self.dtype)[token_BT], 'batch', None, None)
        x_BTD, captured = jax.lax.scan(jax.checkpoint(block) if remat else block, x_BTD, self.blocks)
        return self.norm(x_BTD), captured

    def __call__(self, token_BT: jax.Array, *, capture: bool = False) -> tuple[jax.Array, Capture]:
        """(logits_BTV in float32, Capture)."""
        hidden_BTD, captured = self.hidden(token_BT, capture=capture)
        head_VD = self.head_VD[...].astype(hidden_BTD.dtype)
        return jnp.einsum('BTD,VD->BTV', hidden_BTD, head_VD, preferred_element_type=jnp.float32), captured
