import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import spec
from sinklab.attend import mask
from sinklab.attend.bias import Bias
from sinklab.model.attention import View
from sinklab.model.block import Block
from sinklab.model.capture import Capture
from sinklab.model.columns import COLUMNS, count
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.norm import PLACEMENTS, norm
from sinklab.model.parameter import product, spread
from sinklab.model.positions import POSITIONS
from sinklab.sharding import place


class Transformer(nnx.Module):
    """LLaMA-style decoder for up to `length` tokens: blocks, scanned; untied embedding and head; no dropout."""

    def __init__(self, model: spec.Model, length: int, rngs: nnx.Rngs):
        self.model, self.length, self.dtype = model, length, jnp.dtype(model.dtype)
        init = INITIALIZATIONS[model.initialization]
        embedding, linear = init.embedding(model, model.width), init.linear(model, model.width)
        shape, axes = (model.vocabulary, model.width), ('vocabulary', 'embed')
        self.embedding_VD = normal(rngs, shape, embedding, axes)
        self.sinks = COLUMNS[model.columns].tokens
        self.sink_TD = normal(rngs, (self.sinks, model.width), embedding, (None, 'embed')) if self.sinks else None

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs)

        self.blocks = stack(rngs)
        self.norm = norm(PLACEMENTS[model.norm].final, model)
        self.head_VD = normal(rngs, shape, linear, axes)
        self.position = POSITIONS[model.position](model, length + self.sinks, rngs)

    def hidden(
        self,
        token_BT: jax.Array,
        *,
        start_BT: jax.Array | None = None,
        position_BT: jax.Array | None = None,
        backend: str = 'chunked',
        capture: bool = False,
        keys: int = 0,
        remat: bool = False,
    ):
        """(hidden_BTD after the last norm, Capture with a leading L: of matrices and residuals if asked to `capture`,
        else of the mass on so many first `keys`).

        start_BT: where the document of each token starts, wanted by a mask of documents alone. Positions count from 0
        unless given.
        """
        if position_BT is None:
            position_BT = np.arange(token_BT.shape[1])[None]
        x_BTD = self.embedding_VD[...][token_BT].astype(self.dtype)
        x_BTD, position_BT = self.with_sink(x_BTD, position_BT)
        view = self.view(token_BT.shape[1], position_BT, start_BT, backend=backend, capture=capture, keys=keys)
        block = lambda x_BTD, block: block(x_BTD, view)  # noqa: E731
        x_BTD = place(self.position.embed(x_BTD, position_BT), 'batch', None, None)
        x_BTD, captured = jax.lax.scan(jax.checkpoint(block) if remat else block, x_BTD, self.blocks)
        return self.norm(x_BTD)[:, self.sinks :], captured.of_text(self.sinks, count(self.model))

    def with_sink(self, x_BTD: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A sink token, if there is one, stands before the text, at position 0."""
        if not self.sinks:
            return x_BTD, position_BT
        sink_BTD = spread(self.sink_TD[...], (len(x_BTD), 1, x_BTD.shape[-1]), x_BTD.dtype)
        module = np if isinstance(position_BT, np.ndarray) else jnp
        return jnp.concatenate([sink_BTD, x_BTD], 1), module.pad(position_BT + 1, ((0, 0), (1, 0)))

    def view(self, length: int, position_BT: jax.Array, start_BT: jax.Array | None, **how) -> View:
        nowhere = count(self.model) - self.sinks
        bias = Bias(
            curve=self.position.curve(),
            query_BT=position_BT,
            key_BS=jnp.pad(position_BT, ((0, 0), (nowhere, 0))),
            offset=self.model.attention.offset * math.log(self.length),
        )
        rotate = lambda x_BTHK: self.position.rotate(x_BTHK, position_BT)  # noqa: E731
        return View(self.mask(length, start_BT).padded(before=self.sinks), rotate, bias, **how)

    def mask(self, length: int, start_BT: jax.Array | None) -> mask.Mask:
        given = self.model.mask
        seen = mask.prefix(length, given.prefix or 1)
        if given.window:
            seen &= mask.window(length, given.window)
        if given.block:
            seen &= mask.block(length, given.block)
        if given.document:
            seen &= mask.document(start_BT)
        return seen

    def __call__(self, token_BT: jax.Array, *, capture: bool = False, **where) -> tuple[jax.Array, Capture]:
        """(logits_BTV in float32, Capture)."""
        hidden_BTD, captured = self.hidden(token_BT, capture=capture, **where)
        return logits(hidden_BTD, self.head_VD[...]), captured


def logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """logits_BTV in float32."""
    return product('BTD,VD->BTV', hidden_BTD, head_VD, jnp.float32)
