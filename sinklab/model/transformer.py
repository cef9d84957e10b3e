"""The Transformer: embedding, scanned blocks with rematerialization, and the output head.

Rematerialization saves activations by the names that `checkpoint_name` gives them; the residual stream before each
block is always saved.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from sinklab.attn.mask import resolve_mask
from sinklab.config import spec
from sinklab.config.spec import parse_saved_activations
from sinklab.model.attention import (
    AttentionContext,
    Intermediates,
    LayerContext,
    SelfAttention,
    make_attention_spec,
    make_layer_type_indices,
)
from sinklab.model.layers import (
    FFN,
    INITIALIZATIONS,
    NORM_PLACEMENTS,
    BranchNorms,
    make_norm,
    make_normal_param,
)
from sinklab.model.learned_kv import LEARNED_KV_KINDS
from sinklab.model.positions import POSITIONS, PositionEncoding
from sinklab.parallel.param_einsum import look_up, sharded_einsum
from sinklab.parallel.sharding import constrain_sharding


def apply_remat(layer: Callable, remat: str) -> Callable:
    """Wrap a layer in `jax.checkpoint` with the policy of --remat.

    Args:
        layer: Function of a scan over blocks.
        remat: `none` saves all activations, `full` saves none, and comma-separated names save the activations with
            these names.
    """
    if remat == 'none':
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*parse_saved_activations(remat))
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)  # the scan already prevents CSE


class Block(nnx.Module):
    """Attention, then the FFN, each a branch of the residual stream."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        self.attention_norms = BranchNorms(model, rngs)
        self.attention = SelfAttention(model, rngs)
        self.ffn_norms = BranchNorms(model, rngs)
        self.ffn = FFN(model, rngs)

    def __call__(self, x_BTD: jax.Array, context: LayerContext) -> tuple[jax.Array, Intermediates]:
        norms = self.attention_norms
        num_sink_tokens = self.attention.learned_kv.tokens_class.num_tokens
        normed_BTD = norms.before(x_BTD)
        if context.edit is not None:
            normed_BTD = context.edit('normed', normed_BTD[:, :, None], num_sink_tokens)[:, :, 0]
        attended_BTD, intermediates = self.attention(normed_BTD, context)
        x_BTD = checkpoint_name(
            norms.joined(constrain_sharding(x_BTD + norms.after(attended_BTD), 'batch', None, None)), 'middle'
        )
        norms = self.ffn_norms
        ffn_BTD = norms.after(self.ffn(norms.before(x_BTD)))
        if context.edit is not None:
            ffn_BTD = context.edit('ffn', ffn_BTD[:, :, None], num_sink_tokens)[:, :, 0]
        sum_BTD = constrain_sharding(x_BTD + ffn_BTD, 'batch', None, None)
        if context.edit is not None:
            sum_BTD = context.edit('residual', sum_BTD[:, :, None], num_sink_tokens)[:, :, 0]
        if context.capture:
            intermediates = dataclasses.replace(
                intermediates, normed_BTD=normed_BTD, ffn_BTD=ffn_BTD, residual_BTD=sum_BTD
            )
        return norms.joined(sum_BTD), intermediates


EMBEDDING_AXES = 'vocabulary', 'embed'  # logical axes of embedding and head


class Transformer(nnx.Module):
    """LLaMA-style decoder for up to `length` tokens, with scanned blocks and without dropout."""

    def __init__(self, model: spec.ModelConfig, length: int, rngs: nnx.Rngs):
        self.model = model
        self.length = length
        self.dtype = jnp.dtype(model.dtype)
        init = INITIALIZATIONS[model.initialization]
        embedding = init.embedding(model, model.width)
        linear = init.linear(model, model.width)
        shape = model.vocabulary, model.width
        self.embedding_VD = make_normal_param(rngs, shape, embedding, EMBEDDING_AXES, inputs=None)
        self.sink = LEARNED_KV_KINDS[model.learned_kv.kind].tokens_class(model, rngs)

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs)

        self.blocks = make_blocks(rngs)
        self.norm = make_norm(NORM_PLACEMENTS[model.norm].final, model, rngs)
        self.head_VD = None if model.tied else make_normal_param(rngs, shape, linear, EMBEDDING_AXES, inputs=None)
        self.position, *global_position = (
            POSITIONS[layer_type.position](layer_type, length + self.sink.num_tokens, rngs)
            for layer_type in model.layer_types
        )
        self.global_position = global_position[0] if global_position else None

    @property
    def head(self) -> nnx.Param:
        return self.embedding_VD if self.head_VD is None else self.head_VD

    @property
    def positions(self) -> tuple[PositionEncoding, ...]:
        """The position encodings of `model.layer_types`."""
        return (self.position,) if self.global_position is None else (self.position, self.global_position)

    def compute_first_values(self, x_BTD: jax.Array) -> jax.Array | None:
        """Return the values of the first layer for its input; None without a value residual (2410.17897)."""
        if not self.model.value_residual:
            return None
        first_block = jax.tree.map(lambda leaf: leaf[0], self.blocks)
        return first_block.attention.project_values(first_block.attention_norms.before(x_BTD))

    def embed(self, token_BT: jax.Array) -> jax.Array:
        """Return the embeddings of tokens."""
        x_BTD = look_up(self.embedding_VD, token_BT, self.dtype)
        return x_BTD * jnp.asarray(self.model.width**0.5, self.dtype) if self.model.scaled_embedding else x_BTD

    def compute_hidden(
        self,
        token_BT: jax.Array,
        *,
        start_BT: jax.Array | None = None,
        position_BT: jax.Array | np.ndarray | None = None,
        backend: str = 'chunked',
        capture: bool = False,
        num_first_keys: int = 0,
        remat: str = 'none',
        edit: Callable[..., jax.Array] | None = None,
    ) -> tuple[jax.Array, Intermediates]:
        """Compute the hidden states after the last norm.

        Args:
            token_BT: Token ids.
            start_BT: Index at which the document of each token starts; needed for a document mask only.
            position_BT: Positions of the tokens; None for 0, 1, 2, ...
            backend: Name in `BACKENDS`.
            capture: Return attention matrices and residual streams, with the `dense` backend.
            num_first_keys: Return the attention mass on this many first keys, unless `capture` is True; 0 for none.
            remat: Which activations are saved for the backward pass; see `apply_remat`.
            edit: Function (layer, from 0, *arguments of an `EditFn`) that edits arrays; with `capture` only.

        Returns:
            hidden_BTD, and the `Intermediates` of all layers, with a leading axis L.
        """
        length = token_BT.shape[1]
        if position_BT is None:
            position_BT = np.arange(length)[None]
        query_position_BT = self.sink.shift_positions(position_BT)

        def make_context(layer_type: spec.ModelConfig, position: PositionEncoding) -> AttentionContext:
            mask = resolve_mask(layer_type.mask, length, start_BT)
            attention_spec = make_attention_spec(
                layer_type, self.length, position.make_relative_bias(), position_BT, mask
            )
            rotate = functools.partial(position.rotate, position_BT=query_position_BT)
            return AttentionContext(attention_spec, rotate, 'dense' if capture else backend, capture, num_first_keys)

        contexts = [*map(make_context, self.model.layer_types, self.positions)]

        def layer(x_BTD, inputs):
            block, type_index, layer_index = inputs
            layer_contexts = (
                contexts if edit is None else [context.add_edit(edit, layer_index) for context in contexts]
            )
            return block(x_BTD, LayerContext(layer_contexts, type_index, first_value_BTGK))

        x_BTD = self.sink.prepend(self.embed(token_BT))
        x_BTD = constrain_sharding(self.position.embed(x_BTD, query_position_BT), 'batch', None, None)
        first_value_BTGK = self.compute_first_values(x_BTD)
        layer_indices = None if edit is None else jnp.arange(self.model.layers)
        inputs = self.blocks, make_layer_type_indices(self.model), layer_indices
        x_BTD, intermediates = jax.lax.scan(apply_remat(layer, remat), x_BTD, inputs)
        return self.norm(x_BTD)[:, self.sink.num_tokens :], intermediates.slice_text(self.sink.num_tokens)

    def __call__(
        self, token_BT: jax.Array, *, capture: bool = False, **hidden_options
    ) -> tuple[jax.Array, Intermediates]:
        """Compute logits_BTV in float32, and `Intermediates`; see `compute_hidden` for the options."""
        hidden_BTD, intermediates = self.compute_hidden(token_BT, capture=capture, **hidden_options)
        return compute_logits(hidden_BTD, self.head[...]), intermediates


def compute_logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Compute logits_BTV in float32."""
    return sharded_einsum('BTD,VD->BTV', EMBEDDING_AXES, jnp.float32, hidden_BTD, head_VD)
