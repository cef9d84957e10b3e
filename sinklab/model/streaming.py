"""Reading on and on: of all that was read a model keeps the first x tokens and the last y (StreamingLLM).

Keys are kept before they are rotated, and positions are counted among what is kept: token t asks at position
min(t, x + y), the first x stand at 0, 1, ..., the last y at the distances that they have in the text. Where positions
are embedded a token is embedded at the one that it asks at, and what is kept of it stays so. A learned sink token is
token 0, one of the x; other columns are always seen and count nothing. A window counts positions, too.

How many tokens are read at once, one or a thousand, changes nothing: each query sees what it would see alone.
"""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from sinklab.attn import chunked, reference
from sinklab.attn.operations import resolve_operation
from sinklab.attn.spec import ScoreBias
from sinklab.config import spec
from sinklab.model.attention import COMBINATIONS, SelfAttention
from sinklab.model.learned_kv import LEARNED_KV_KINDS
from sinklab.model.positions import POSITIONS, PositionEncoding
from sinklab.model.transformer import Transformer
from sinklab.parallel.mixed_precision import look_up

CHUNK_SIZE = 128  # queries whose scores are alive at once
ALWAYS_TIME, NEVER_TIME = -1, 1 << 30  # times of keys: before all tokens, and after all
Tree = TypeVar('Tree')


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What a token sees beside itself: x first and y recent ones."""

    num_first: int
    num_recent: int

    def __str__(self) -> str:
        return f'{self.num_first}+{self.num_recent}'

    @property
    def size(self) -> int:
        return self.num_first + self.num_recent

    def clip(self, num_tokens: int) -> 'CacheConfig':
        """A cache that keeps the same of so many tokens."""
        return CacheConfig(min(self.num_first, num_tokens), min(self.num_recent, num_tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    key_BSHK: jax.Array  # not rotated
    value_BSHK: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Of a layer; what is not filled yet is seen by nobody."""

    first: KeyValues
    recent: KeyValues  # the last of them just before what is read next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamState:
    """A text as far as it has been read."""

    num_read: jax.Array  # so many tokens, with a sink token
    caches: KVCache  # with a leading L


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotatedQueries:
    """As they are rotated for some of the keys; B of positions and times is 1."""

    query_BTHK: jax.Array
    position_BT: jax.Array
    time_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotatedKeys:
    key_values: KeyValues  # rotated, columns left of them
    position_BS: jax.Array
    time_BS: jax.Array
    num_learned_kv: int = dataclasses.field(default=0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class StreamingContext:
    """How a layer sees what it has kept and what is read now, in the place of a View."""

    cache_config: CacheConfig
    model: spec.ModelConfig
    length: int  # of the windows that the model is trained on
    position: PositionEncoding
    start_time: jax.Array  # of the first token that is read now
    kv_cache: KVCache
    capture = False

    def attend_heads(self, layer: SelfAttention, query_BTHK, key_BTHK, value_BTHK) -> tuple[jax.Array, KVCache]:
        """(what each head aggregates, what is kept from there on)."""
        new_kv = KeyValues(key_BTHK, value_BTHK)
        first_kv = fill_first(self.kv_cache.first, new_kv, self.start_time)
        recent_kv = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), self.kv_cache.recent, new_kv)
        kv_cache = KVCache(first_kv, slice_tokens(recent_kv, query_BTHK.shape[1], self.cache_config.num_recent))
        return self.attend(layer, query_BTHK, first_kv, recent_kv), kv_cache

    def attend(
        self, layer: SelfAttention, query_BTHK: jax.Array, first_kv: KeyValues, recent_kv: KeyValues
    ) -> jax.Array:
        """o_i = sum_j A_ij v_j over columns, first and recent tokens, a chunk of queries after another."""
        length = query_BTHK.shape[1]
        chunk_size = min(CHUNK_SIZE, length) if is_shift_invariant(self.model) else 1
        num_chunks = -(-length // chunk_size)
        query_BTHK, recent_kv = pad_tokens((query_BTHK, recent_kv), num_chunks * chunk_size - length)
        first_keys = self.make_first_keys(layer, first_kv)

        def attend_chunk(start: jax.Array) -> jax.Array:
            slices = (
                slice_tokens(query_BTHK, start, chunk_size),
                slice_tokens(recent_kv, start, self.cache_config.num_recent + chunk_size),
            )
            return self.attend_chunk(layer, *slices, first_keys, self.start_time + start)

        return chunked.join_chunks(jax.lax.map(attend_chunk, chunk_size * jnp.arange(num_chunks)), 1, length)

    def attend_chunk(
        self,
        layer: SelfAttention,
        query_BTHK: jax.Array,
        recent_kv: KeyValues,
        first_keys: RotatedKeys,
        start_time: jax.Array,
    ) -> jax.Array:
        """Of queries from a time on. To the first tokens each stands as in the cache, to the recent ones as the first
        of them does there, and the others after it: so it is rotated twice, and has one row."""
        offset_BT = jnp.arange(query_BTHK.shape[1])[None]
        time_BT = start_time + offset_BT
        position_in_cache_BT = jnp.minimum(time_BT, self.cache_config.size)
        consecutive_BT = position_in_cache_BT[:, :1] + offset_BT
        queries_of_first, queries_of_recent = (
            RotatedQueries(layer.feature_map(self.position.rotate(query_BTHK, position_BT)), position_BT, time_BT)
            for position_BT in (position_in_cache_BT, consecutive_BT)
        )
        recent_keys = self.make_recent_keys(layer, recent_kv, first_keys, (consecutive_BT[:, :1], time_BT[:, :1]))
        return self.attend_rows(layer, [(queries_of_first, first_keys), (queries_of_recent, recent_keys)])

    def make_first_keys(self, layer: SelfAttention, first_kv: KeyValues) -> RotatedKeys:
        """The first tokens, and the columns left of them."""
        index_BS = jnp.arange(first_kv.key_BSHK.shape[1])[None]
        key_BSHK, value_BSHK = layer.columns.prepend(
            self.position.rotate(first_kv.key_BSHK, index_BS), first_kv.value_BSHK
        )
        num_learned_kv = key_BSHK.shape[1] - index_BS.shape[1]
        position_BS, time_BS = (
            jnp.pad(index_BS, ((0, 0), (num_learned_kv, 0)), constant_values=value) for value in (0, ALWAYS_TIME)
        )
        return RotatedKeys(KeyValues(layer.feature_map(key_BSHK), value_BSHK), position_BS, time_BS, num_learned_kv)

    def make_recent_keys(
        self, layer: SelfAttention, recent_kv: KeyValues, first_keys: RotatedKeys, starts: tuple[jax.Array, jax.Array]
    ) -> RotatedKeys:
        """The recent tokens up to where is asked, by position and time, without those that are among the first."""
        offset_BS = jnp.arange(recent_kv.key_BSHK.shape[1])[None] - self.cache_config.num_recent
        position_BS, time_BS = (start + offset_BS for start in starts)
        key_BSHK = layer.feature_map(self.position.rotate(recent_kv.key_BSHK, position_BS))
        is_first_BS = time_BS < first_keys.position_BS.shape[1] - first_keys.num_learned_kv
        return RotatedKeys(
            KeyValues(key_BSHK, recent_kv.value_BSHK), position_BS, jnp.where(is_first_BS, NEVER_TIME, time_BS)
        )

    def attend_rows(
        self, layer: SelfAttention, query_key_groups: list[tuple[RotatedQueries, RotatedKeys]]
    ) -> jax.Array:
        """What some queries aggregate of several kinds of keys, which are one row to each of them."""
        attention_operation = resolve_operation(self.model.attention, self.length)
        score_BHTS = (
            jnp.concatenate(
                [self.compute_scores(layer, *query_key_group) for query_key_group in query_key_groups], -1
            )
            + attention_operation.offset
        )
        visible_B1TS = jnp.concatenate(
            [self.compute_mask(*query_key_group) for query_key_group in query_key_groups], -1
        )[:, None]
        weight_BHTS, _ = reference.compute_weights(
            score_BHTS, visible_B1TS, attention_operation, LEARNED_KV_KINDS[self.model.columns.kind].num_keys
        )
        value_BSHK = jnp.concatenate([keys.key_values.value_BSHK for _, keys in query_key_groups], 1)
        return jnp.einsum('BHTS,BSHK->BTHK', weight_BHTS.astype(value_BSHK.dtype), value_BSHK)

    def compute_scores(self, layer: SelfAttention, queries: RotatedQueries, keys: RotatedKeys) -> jax.Array:
        """<q_i, k_j> / sqrt(K) + b_ij as score_BHTS."""
        bias = ScoreBias(
            self.position.make_relative_bias(), queries.position_BT, keys.position_BS, layer.columns.get_bias_HC()
        )
        score_BHTS = reference.compute_scores(queries.query_BTHK, keys.key_values.key_BSHK)
        return score_BHTS + bias.materialize(keys.num_learned_kv, score_BHTS.shape[-1] - keys.num_learned_kv)

    def compute_mask(self, queries: RotatedQueries, keys: RotatedKeys) -> jax.Array:
        """bool_BTS: what is kept of the text, as far as the window of the model goes."""
        time_B1S = keys.time_BS[:, None]
        lag_BTS = queries.time_BT[..., None] - time_B1S
        distance_BTS = queries.position_BT[..., None] - keys.position_BS[:, None]
        is_cached = (lag_BTS <= self.cache_config.num_recent) | (time_B1S < self.cache_config.num_first)
        window = self.model.mask.window or NEVER_TIME
        is_in_window = (distance_BTS < window) | (
            time_B1S < LEARNED_KV_KINDS[self.model.columns.kind].tokens_class.num_tokens
        )
        return (lag_BTS >= 0) & is_cached & is_in_window


def init_stream(model: Transformer, cache_config: CacheConfig, batch: int = 1) -> StreamState:
    """Nothing read but the sink token, where a model has one."""
    num_sink_tokens, model_spec = model.sink.num_tokens, model.model

    def make_empty(tokens: int) -> KeyValues:
        value_width = (
            model_spec.width if COMBINATIONS[model_spec.combination].has_wide_values else model_spec.head_width
        )
        sizes = (
            (model_spec.layers, batch, tokens, model_spec.heads, width)
            for width in (model_spec.head_width, value_width)
        )
        return KeyValues(*(jnp.zeros(size, model.dtype) for size in sizes))

    state = StreamState(
        jnp.int32(0),
        KVCache(make_empty(max(cache_config.num_first, num_sink_tokens)), make_empty(cache_config.num_recent)),
    )
    empty_BTD = jnp.zeros((batch, 0, model_spec.width), model.dtype)
    return advance_stream(model, cache_config, state, model.sink.prepend(empty_BTD))[1] if num_sink_tokens else state


def read_tokens(
    model: Transformer, cache_config: CacheConfig, state: StreamState, token_BT: jax.Array
) -> tuple[jax.Array, StreamState]:
    """(hidden_BTD after the last norm, the stream with these tokens), all of them at once."""
    return advance_stream(model, cache_config, state, look_up(model.embedding_VD, token_BT, model.dtype))


def advance_stream(
    model: Transformer, cache_config: CacheConfig, state: StreamState, x_BTD: jax.Array
) -> tuple[jax.Array, StreamState]:
    time_BT = state.num_read + jnp.arange(x_BTD.shape[1])[None]
    x_BTD = model.position.embed(x_BTD, jnp.minimum(time_BT, cache_config.size))

    def layer(x_BTD: jax.Array, block_and_cache: tuple) -> tuple[jax.Array, KVCache]:
        block, kv_cache = block_and_cache
        return block(
            x_BTD, StreamingContext(cache_config, model.model, model.length, model.position, state.num_read, kv_cache)
        )

    x_BTD, caches = jax.lax.scan(layer, x_BTD, (model.blocks, state.caches))
    return model.norm(x_BTD), StreamState(state.num_read + x_BTD.shape[1], caches)


def is_shift_invariant(model: spec.ModelConfig) -> bool:
    """Whether a query and its keys may be moved together: not if what is rotated is mapped afterwards."""
    return model.attention.feature_map == 'identity' or POSITIONS[model.position].rotate is PositionEncoding.rotate


def fill_first(first_kv: KeyValues, new_kv: KeyValues, start_time: jax.Array) -> KeyValues:
    """The first tokens, with those of them that are read now."""
    num_new = new_kv.key_BSHK.shape[1]
    offset_S = jnp.arange(first_kv.key_BSHK.shape[1]) - start_time
    is_new_S11 = ((offset_S >= 0) & (offset_S < num_new))[:, None, None]
    source_S = jnp.clip(offset_S, 0, num_new - 1)
    return jax.tree.map(lambda old, new: jnp.where(is_new_S11, new[:, source_S], old), first_kv, new_kv)


def slice_tokens(tree: Tree, start: jax.Array | int, num_tokens: int) -> Tree:
    """So many places of each array, along its second axis."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, num_tokens, 1), tree)


def pad_tokens(tree: Tree, padding: int) -> Tree:
    """With so many places more at the end."""
    return jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0))), tree)
