import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import spec
from sinklab.attend.mask import mask_of
from sinklab.attend.received import Values
from sinklab.model.attention import View
from sinklab.model.block import Block
from sinklab.model.capture import Capture
from sinklab.model.columns import COLUMNS
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.norm import PLACEMENTS, norm
from sinklab.model.parameter import look_up, multiply
from sinklab.model.positions import POSITIONS
from sinklab.model.remat import rematerialized
from sinklab.model.rule import rule
from sinklab.sharding import place

TABLE = 'vocabulary', 'embed'  # axes of embedding and head


class Transformer(nnx.Module):
    """LLaMA-style decoder for up to `length` tokens: blocks, scanned; no dropout."""

    def __init__(self, model: spec.Model, length: int, rngs: nnx.Rngs):
        self.model, self.length, self.dtype = model, length, jnp.dtype(model.dtype)
        init = INITIALIZATIONS[model.initialization]
        embedding, linear = init.embedding(model, model.width), init.linear(model, model.width)
        shape = model.vocabulary, model.width
        self.embedding_VD = normal(rngs, shape, embedding, TABLE, inputs=None)
        self.sink = COLUMNS[model.columns.kind].token(model, rngs)

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs)

        self.blocks = stack(rngs)
        self.norm = norm(PLACEMENTS[model.norm].final, model)
        self.head_VD = None if model.tied else normal(rngs, shape, linear, TABLE, inputs=None)
        self.position = POSITIONS[model.position](model, length + self.sink.count, rngs)

    @property
    def head(self) -> nnx.Param:
        return self.embedding_VD if self.head_VD is None else self.head_VD

    def hidden(
        self,
        token_BT: jax.Array,
        *,
        start_BT: jax.Array | None = None,
        position_BT: jax.Array | None = None,
        backend: str = 'chunked',
        capture: bool = False,
        keys: int = 0,
        rows: Values = types.MappingProxyType({}),
        remat: str = 'none',
    ) -> tuple[jax.Array, Capture]:
        """(hidden_BTD after the last norm, Capture with a leading L: of matrices and residuals if asked to `capture`,
        else of the mass on so many first `keys`, and of the means of what `rows` read of whole rows).

        start_BT: where the document of each token starts, wanted by a mask of documents alone. Positions count from 0
        unless given.
        """
        length = token_BT.shape[1]
        if position_BT is None:
            position_BT = np.arange(length)[None]
        mask = mask_of(self.model.mask, length, start_BT)
        seen = rule(self.model, self.length, self.position.curve(), position_BT, mask)
        position_BT = seen.bias.query_BT

        def rotate(x_BTHK):
            return self.position.rotate(x_BTHK, position_BT)

        view = View(seen, rotate, 'dense' if capture else backend, capture, keys, rows)

        def layer(x_BTD, block):
            return block(x_BTD, view)

        x_BTD = self.sink.attach(look_up(self.embedding_VD, token_BT, self.dtype))
        x_BTD = place(self.position.embed(x_BTD, position_BT), 'batch', None, None)
        x_BTD, captured = jax.lax.scan(rematerialized(layer, remat), x_BTD, self.blocks)
        return self.norm(x_BTD)[:, self.sink.count :], captured.of_text(self.sink.count)

    def __call__(self, token_BT: jax.Array, *, capture: bool = False, **where) -> tuple[jax.Array, Capture]:
        """(logits_BTV in float32, Capture)."""
        hidden_BTD, captured = self.hidden(token_BT, capture=capture, **where)
        return logits(hidden_BTD, self.head[...]), captured


def logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """logits_BTV in float32."""
    return multiply('BTD,VD->BTV', TABLE, jnp.float32, hidden_BTD, head_VD)
