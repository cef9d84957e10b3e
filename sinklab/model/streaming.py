"""Streaming forward pass with a KV cache of the x first and y most recent tokens (StreamingLLM).

The cache stores keys before rotation, and positions are positions in the cache: token t is a query at position
min(t, x + y), the first x tokens have the positions 0, 1, ..., and the last y tokens are at their distances in the
text. Embedded position encodings are added at the position of the query, and stay in the cache. A learned sink token
is token 0, one of the x first tokens; other learned keys are always visible and do not count. A window of the
model also counts positions in the cache. A text counts as one document: `mask.document` hides none of its tokens.

Apart from rounding, the number of tokens that are read at once does not change the result: each query sees what it
would see alone.
"""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab.attn import chunked, reference
from sinklab.attn.operations import resolve_operation
from sinklab.attn.spec import ScoreBias
from sinklab.config import spec
from sinklab.model.attention import (
    LayerContext,
    count_attended_kv_heads,
    get_value_width,
    make_layer_type_indices,
)
from sinklab.model.learned_kv import LEARNED_KV_KINDS, LearnedKV
from sinklab.model.positions import PositionEncoding
from sinklab.model.transformer import Transformer

ALWAYS_VISIBLE_INDEX, HIDDEN_INDEX = -1, 1 << 30  # of keys that every query sees, and that no query sees
Tree = TypeVar('Tree')


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Numbers of first and recent tokens in a KV cache, which a token sees in addition to itself."""

    num_first: int
    num_recent: int

    def __str__(self) -> str:
        return f'{self.num_first}+{self.num_recent}'

    @property
    def size(self) -> int:
        return self.num_first + self.num_recent

    def clip(self, num_tokens: int) -> 'CacheConfig':
        """Return a config that keeps the same tokens of a text of `num_tokens` tokens."""
        return CacheConfig(min(self.num_first, num_tokens), min(self.num_recent, num_tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    key_BSGK: jax.Array  # not rotated
    value_BSGK: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The KV cache of a layer; no query sees entries that are not filled yet."""

    first: KeyValues
    recent: KeyValues  # the last one directly precedes the next token to be read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamState:
    """The state of a stream: the number of tokens that were read, and the KV cache of each layer."""

    num_read: jax.Array  # number of tokens read, including a sink token
    caches: KVCache  # with a leading axis L


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotatedQueries:
    """Queries that are rotated for one group of keys; B of positions and token indices is 1."""

    query_BTHK: jax.Array
    position_BT: jax.Array
    token_index_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotatedKeys:
    key_values: KeyValues  # rotated, with learned keys first
    position_BS: jax.Array
    token_index_BS: jax.Array
    learned_bias_HC: jax.Array | None = None  # biases of the scores of learned keys without a position
    num_learned_kv: int = dataclasses.field(default=0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class StreamingContext:
    """Replacement of `AttentionContext` that attends to the KV cache and to the tokens being read."""

    cache_config: CacheConfig
    model: spec.ModelConfig  # one of `layer_types`
    length: int  # tokens of a training window
    position: PositionEncoding
    first_token_index: jax.Array  # index in the text of the first token being read
    kv_cache: KVCache
    capture = False
    edit = None

    def attend(
        self,
        query_BTHK,
        key_BTGK,
        value_BTGK,
        feature_map: nnx.Module,
        learned_kv: LearnedKV,
        forget_position_BTH=None,
    ) -> tuple[jax.Array, KVCache]:
        """Return the outputs of the heads and the new KV cache; see `AttentionContext.attend` for the arguments."""
        new_kv = KeyValues(key_BTGK, value_BTGK)
        length = query_BTHK.shape[1]
        first_kv = update_first_tokens(self.kv_cache.first, new_kv, self.first_token_index)
        recent_kv = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), self.kv_cache.recent, new_kv)
        kv_cache = KVCache(first_kv, slice_tokens(recent_kv, length, self.cache_config.num_recent))
        first_keys = self.make_first_keys(first_kv, feature_map, learned_kv)
        return self.attend_queries(query_BTHK, first_keys, recent_kv, feature_map), kv_cache

    def attend_queries(
        self, query_BTHK: jax.Array, first_keys: RotatedKeys, recent_kv: KeyValues, feature_map: nnx.Module
    ) -> jax.Array:
        """Compute o_i = sum_j A_ij v_j over learned, first and recent keys, one chunk of queries at a time.

        Each query is rotated twice, for one row of scores: for the first tokens at its position in the cache, for the
        recent tokens at consecutive positions. Keys of recent tokens are rotated once for all queries: scores depend
        only on distances.
        """
        length = query_BTHK.shape[1]
        num_recent = self.cache_config.num_recent
        chunk_size = min(chunked.CHUNK_SIZE, length)
        num_chunks = -(-length // chunk_size)
        padding = (0, 0), (0, num_chunks * chunk_size - length), (0, 0), (0, 0)
        query_BTHK, recent_kv = jax.tree.map(lambda array: jnp.pad(array, padding), (query_BTHK, recent_kv))
        offset_BT = jnp.arange(query_BTHK.shape[1])[None]
        token_index_BT = self.first_token_index + offset_BT
        queries_of_first, queries_of_recent = (
            RotatedQueries(feature_map(self.position.rotate(query_BTHK, position_BT)), position_BT, token_index_BT)
            for position_BT in (jnp.minimum(token_index_BT, self.cache_config.size), offset_BT)
        )
        recent_keys = self.make_recent_keys(recent_kv, first_keys, feature_map)

        def attend_chunk(index: jax.Array) -> jax.Array:
            chunk_queries = slice_tokens([queries_of_first, queries_of_recent], index, chunk_size)
            chunk_keys = slice_tokens(recent_keys, index, num_recent + chunk_size)
            return self.attend_rows([*zip(chunk_queries, (first_keys, chunk_keys), strict=True)])

        return chunked.join_chunks(jax.lax.map(attend_chunk, chunk_size * jnp.arange(num_chunks)), 1, length)

    def make_first_keys(self, first_kv: KeyValues, feature_map: nnx.Module, learned_kv: LearnedKV) -> RotatedKeys:
        """Make the keys of the first tokens, with learned keys before them."""
        index_BS = jnp.arange(first_kv.key_BSGK.shape[1])[None]
        key_BSGK, value_BSGK = learned_kv.prepend(
            self.position.rotate(first_kv.key_BSGK, index_BS), first_kv.value_BSGK
        )
        num_learned_kv = key_BSGK.shape[1] - index_BS.shape[1]
        position_BS, token_index_BS = (
            jnp.pad(index_BS, ((0, 0), (num_learned_kv, 0)), constant_values=value)
            for value in (0, ALWAYS_VISIBLE_INDEX)
        )
        key_values = KeyValues(feature_map(key_BSGK), value_BSGK)
        return RotatedKeys(key_values, position_BS, token_index_BS, learned_kv.get_score_bias_HC(), num_learned_kv)

    def make_recent_keys(self, recent_kv: KeyValues, first_keys: RotatedKeys, feature_map: nnx.Module) -> RotatedKeys:
        """Make the keys of recent tokens; those that are also first tokens are hidden from all queries."""
        position_BS = jnp.arange(recent_kv.key_BSGK.shape[1])[None] - self.cache_config.num_recent
        token_index_BS = self.first_token_index + position_BS
        key_BSGK = feature_map(self.position.rotate(recent_kv.key_BSGK, position_BS))
        is_first_BS = token_index_BS < first_keys.position_BS.shape[1] - first_keys.num_learned_kv
        return RotatedKeys(
            KeyValues(key_BSGK, recent_kv.value_BSGK),
            position_BS,
            jnp.where(is_first_BS, HIDDEN_INDEX, token_index_BS),
        )

    def attend_rows(self, query_key_groups: list[tuple[RotatedQueries, RotatedKeys]]) -> jax.Array:
        """Attend to several groups of keys that form one row for each query."""
        attention_operation = resolve_operation(self.model.attention, self.length)
        score_BHTS = (
            jnp.concatenate([self.compute_scores(*query_key_group) for query_key_group in query_key_groups], -1)
            + attention_operation.offset
        )
        visible_B1TS = jnp.concatenate(
            [self.compute_mask(*query_key_group) for query_key_group in query_key_groups], -1
        )[:, None]
        weight_BHTS, _ = reference.compute_weights(
            score_BHTS, visible_B1TS, attention_operation, LEARNED_KV_KINDS[self.model.learned_kv.kind].num_keys
        )
        value_BSGK = jnp.concatenate([keys.key_values.value_BSGK for _, keys in query_key_groups], 1)
        weight_BGXS = weight_BHTS.reshape(weight_BHTS.shape[0], value_BSGK.shape[2], -1, weight_BHTS.shape[-1])
        return split_query_groups(reference.sum_values(weight_BGXS, value_BSGK), weight_BHTS.shape[2])

    def compute_scores(self, queries: RotatedQueries, keys: RotatedKeys) -> jax.Array:
        """Compute <q_i, k_j> / sqrt(K) + b_ij as score_BHTS."""
        bias = ScoreBias(
            self.position.make_relative_bias(),
            queries.position_BT[..., None],
            keys.position_BS[..., None],
            keys.learned_bias_HC,
        )
        key_BSGK = keys.key_values.key_BSGK
        score_BGXS = reference.compute_scores(join_query_groups(queries.query_BTHK, key_BSGK.shape[2]), key_BSGK)
        batch, length, num_heads, _ = queries.query_BTHK.shape
        score_BHTS = score_BGXS.reshape(batch, num_heads, length, -1)
        return score_BHTS + bias.materialize(keys.num_learned_kv, score_BHTS.shape[-1] - keys.num_learned_kv)

    def compute_mask(self, queries: RotatedQueries, keys: RotatedKeys) -> jax.Array:
        """Return which keys are in the cache and in the attention window of the model, as bool_BTS."""
        token_index_B1S = keys.token_index_BS[:, None]
        lag_BTS = queries.token_index_BT[..., None] - token_index_B1S
        distance_BTS = queries.position_BT[..., None] - keys.position_BS[:, None]
        is_cached = (lag_BTS <= self.cache_config.num_recent) | (token_index_B1S < self.cache_config.num_first)
        window = self.model.mask.window or HIDDEN_INDEX
        is_in_window = (distance_BTS < window) | (
            token_index_B1S < LEARNED_KV_KINDS[self.model.learned_kv.kind].tokens_class.num_tokens
        )
        return (lag_BTS >= 0) & is_cached & is_in_window


def init_stream(model: Transformer, cache_config: CacheConfig) -> StreamState:
    """Return the state before one text; a sink token of the model is already read."""
    num_sink_tokens, model_spec = model.sink.num_tokens, model.model

    def make_empty(tokens: int) -> KeyValues:
        sizes = (
            (model_spec.layers, 1, tokens, count_attended_kv_heads(model_spec), width)
            for width in (model_spec.head_width, get_value_width(model_spec))
        )
        return KeyValues(*(jnp.zeros(size, model.dtype) for size in sizes))

    state = StreamState(
        jnp.int32(0),
        KVCache(make_empty(max(cache_config.num_first, num_sink_tokens)), make_empty(cache_config.num_recent)),
    )
    empty_BTD = jnp.zeros((1, 0, model_spec.width), model.dtype)
    return advance_stream(model, cache_config, state, model.sink.prepend(empty_BTD))[1] if num_sink_tokens else state


def read_tokens(
    model: Transformer, cache_config: CacheConfig, state: StreamState, token_BT: jax.Array
) -> tuple[jax.Array, StreamState]:
    """Read a segment of tokens; return hidden_BTD after the last norm, and the new state."""
    return advance_stream(model, cache_config, state, model.embed(token_BT))


def advance_stream(
    model: Transformer, cache_config: CacheConfig, state: StreamState, x_BTD: jax.Array
) -> tuple[jax.Array, StreamState]:
    """Read the embeddings of a segment; see `read_tokens`."""
    token_index_BT = state.num_read + jnp.arange(x_BTD.shape[1])[None]
    x_BTD = model.position.embed(x_BTD, jnp.minimum(token_index_BT, cache_config.size))

    def apply_layer(x_BTD: jax.Array, inputs: tuple) -> tuple[jax.Array, KVCache]:
        block, kv_cache, type_index = inputs
        contexts = [
            StreamingContext(cache_config, layer_type, model.length, position, state.num_read, kv_cache)
            for layer_type, position in zip(model.model.layer_types, model.positions, strict=True)
        ]
        return block(x_BTD, LayerContext(contexts, type_index, first_value_BTGK))

    first_value_BTGK = model.compute_first_values(x_BTD)
    x_BTD, caches = jax.lax.scan(
        apply_layer, x_BTD, (model.blocks, state.caches, make_layer_type_indices(model.model))
    )
    return model.norm(x_BTD), StreamState(state.num_read + x_BTD.shape[1], caches)


def update_first_tokens(first_kv: KeyValues, new_kv: KeyValues, first_token_index: jax.Array) -> KeyValues:
    """Write those of the tokens being read that belong to the first tokens into the cache of first tokens."""
    num_new = new_kv.key_BSGK.shape[1]
    offset_S = jnp.arange(first_kv.key_BSGK.shape[1]) - first_token_index
    is_new_S11 = ((offset_S >= 0) & (offset_S < num_new))[:, None, None]
    source_S = jnp.clip(offset_S, 0, num_new - 1)
    return jax.tree.map(lambda old, new: jnp.where(is_new_S11, new[:, source_S], old), first_kv, new_kv)


def join_query_groups(query_BTHK: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return query_BXGK, where X are the query heads of a key head, and then their tokens.

    Keys are then multiplied without a copy for each query head.
    """
    batch, length, num_heads, width = query_BTHK.shape
    query_BTGRK = query_BTHK.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, width)
    return jnp.moveaxis(query_BTGRK, 3, 1).reshape(batch, -1, num_kv_heads, width)


def split_query_groups(output_BXGK: jax.Array, length: int) -> jax.Array:
    """Return output_BTHK; the inverse of `join_query_groups`."""
    batch, _, num_kv_heads, width = output_BXGK.shape
    output_BRTGK = output_BXGK.reshape(batch, -1, length, num_kv_heads, width)
    return jnp.moveaxis(output_BRTGK, 1, 3).reshape(batch, length, -1, width)


def slice_tokens(tree: Tree, start: jax.Array | int, num_tokens: int) -> Tree:
    """Slice `num_tokens` tokens of each array, along its second axis."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, num_tokens, 1), tree)
