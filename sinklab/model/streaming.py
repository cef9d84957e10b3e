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

from sinklab import spec
from sinklab.attend import chunked, dense
from sinklab.attend.bias import Bias
from sinklab.attend.operation import operation
from sinklab.model.attention import COMBINATIONS, SelfAttention
from sinklab.model.columns import COLUMNS
from sinklab.model.parameter import look_up
from sinklab.model.positions import POSITIONS, Position
from sinklab.model.transformer import Transformer

CHUNK = 128  # queries whose scores are alive at once
ALWAYS, NEVER = -1, 1 << 30  # times of keys: before all tokens, and after all
Tree = TypeVar('Tree')


@dataclasses.dataclass(frozen=True)
class Cache:
    """What a token sees beside itself: x first and y recent ones."""

    first: int
    recent: int

    def __str__(self) -> str:
        return f'{self.first}+{self.recent}'

    @property
    def size(self) -> int:
        return self.first + self.recent

    def within(self, tokens: int) -> 'Cache':
        """A cache that keeps the same of so many tokens."""
        return Cache(min(self.first, tokens), min(self.recent, tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs:
    key_BSHK: jax.Array  # not rotated
    value_BSHK: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """Of a layer; what is not filled yet is seen by nobody."""

    first: Pairs
    recent: Pairs  # the last of them just before what is read next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """A text as far as it has been read."""

    time: jax.Array  # so many tokens, with a sink token
    layers: Kept  # with a leading L


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """As they are rotated for some of the keys; B of positions and times is 1."""

    query_BTHK: jax.Array
    position_BT: jax.Array
    time_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    pairs: Pairs  # rotated, columns left of them
    position_BS: jax.Array
    time_BS: jax.Array
    columns: int = dataclasses.field(default=0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a layer sees what it has kept and what is read now, in the place of a View."""

    cache: Cache
    model: spec.Model
    length: int  # of the windows that the model is trained on
    position: Position
    time: jax.Array  # of the first token that is read now
    kept: Kept
    capture = False

    def heads(self, layer: SelfAttention, query_BTHK, key_BTHK, value_BTHK) -> tuple[jax.Array, Kept]:
        """(what each head aggregates, what is kept from there on)."""
        own = Pairs(key_BTHK, value_BTHK)
        first = filled(self.kept.first, own, self.time)
        recent = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), self.kept.recent, own)
        kept = Kept(first, cut(recent, query_BTHK.shape[1], self.cache.recent))
        return self.attend(layer, query_BTHK, first, recent), kept

    def attend(self, layer: SelfAttention, query_BTHK: jax.Array, first: Pairs, recent: Pairs) -> jax.Array:
        """o_i = sum_j A_ij v_j over columns, first and recent tokens, a chunk of queries after another."""
        length = query_BTHK.shape[1]
        chunk = min(CHUNK, length) if is_of_distances(self.model) else 1
        chunks = -(-length // chunk)
        query_BTHK, recent = padded((query_BTHK, recent), chunks * chunk - length)
        far = self.far(layer, first)

        def of_chunk(start: jax.Array) -> jax.Array:
            given = cut(query_BTHK, start, chunk), cut(recent, start, self.cache.recent + chunk)
            return self.of_chunk(layer, *given, far, self.time + start)

        return chunked.join(jax.lax.map(of_chunk, chunk * jnp.arange(chunks)), 1, length)

    def of_chunk(
        self, layer: SelfAttention, query_BTHK: jax.Array, recent: Pairs, far: Keys, time: jax.Array
    ) -> jax.Array:
        """Of queries from a time on. To the first tokens each stands as in the cache, to the recent ones as the first
        of them does there, and the others after it: so it is rotated twice, and has one row."""
        place_BT = jnp.arange(query_BTHK.shape[1])[None]
        time_BT = time + place_BT
        asks_BT = jnp.minimum(time_BT, self.cache.size)
        follows_BT = asks_BT[:, :1] + place_BT
        to_far, to_near = (
            Queries(layer.feature_map(self.position.rotate(query_BTHK, position_BT)), position_BT, time_BT)
            for position_BT in (asks_BT, follows_BT)
        )
        near = self.near(layer, recent, far, (follows_BT[:, :1], time_BT[:, :1]))
        return self.rows(layer, [(to_far, far), (to_near, near)])

    def far(self, layer: SelfAttention, first: Pairs) -> Keys:
        """The first tokens, and the columns left of them."""
        place_BS = jnp.arange(first.key_BSHK.shape[1])[None]
        key_BSHK, value_BSHK = layer.columns.attach(self.position.rotate(first.key_BSHK, place_BS), first.value_BSHK)
        columns = key_BSHK.shape[1] - place_BS.shape[1]
        position_BS, time_BS = (
            jnp.pad(place_BS, ((0, 0), (columns, 0)), constant_values=value) for value in (0, ALWAYS)
        )
        return Keys(Pairs(layer.feature_map(key_BSHK), value_BSHK), position_BS, time_BS, columns)

    def near(self, layer: SelfAttention, recent: Pairs, far: Keys, asks: tuple[jax.Array, jax.Array]) -> Keys:
        """The recent tokens up to where is asked, by position and time, without those that are among the first."""
        place_BS = jnp.arange(recent.key_BSHK.shape[1])[None] - self.cache.recent
        position_BS, time_BS = (first + place_BS for first in asks)
        key_BSHK = layer.feature_map(self.position.rotate(recent.key_BSHK, position_BS))
        is_first_BS = time_BS < far.position_BS.shape[1] - far.columns
        return Keys(Pairs(key_BSHK, recent.value_BSHK), position_BS, jnp.where(is_first_BS, NEVER, time_BS))

    def rows(self, layer: SelfAttention, sides: list[tuple[Queries, Keys]]) -> jax.Array:
        """What some queries aggregate of several kinds of keys, which are one row to each of them."""
        rule = operation(self.model.attention, self.length)
        score_BHTS = jnp.concatenate([self.scores(layer, *side) for side in sides], -1) + rule.offset
        visible_B1TS = jnp.concatenate([self.visible(*side) for side in sides], -1)[:, None]
        weight_BHTS, _ = dense.weights(score_BHTS, visible_B1TS, rule, COLUMNS[self.model.columns.kind].count)
        value_BSHK = jnp.concatenate([keys.pairs.value_BSHK for _, keys in sides], 1)
        return jnp.einsum('BHTS,BSHK->BTHK', weight_BHTS.astype(value_BSHK.dtype), value_BSHK)

    def scores(self, layer: SelfAttention, queries: Queries, keys: Keys) -> jax.Array:
        """<q_i, k_j> / sqrt(K) + b_ij as score_BHTS."""
        bias = Bias(self.position.curve(), queries.position_BT, keys.position_BS, layer.columns.score_HC())
        score_BHTS = dense.scores(queries.query_BTHK, keys.pairs.key_BSHK)
        return score_BHTS + bias.matrix(keys.columns, score_BHTS.shape[-1] - keys.columns)

    def visible(self, queries: Queries, keys: Keys) -> jax.Array:
        """bool_BTS: what is kept of the text, as far as the window of the model goes."""
        time_B1S = keys.time_BS[:, None]
        lag_BTS = queries.time_BT[..., None] - time_B1S
        distance_BTS = queries.position_BT[..., None] - keys.position_BS[:, None]
        kept = (lag_BTS <= self.cache.recent) | (time_B1S < self.cache.first)
        window = self.model.mask.window or NEVER
        near = (distance_BTS < window) | (time_B1S < COLUMNS[self.model.columns.kind].token.count)
        return (lag_BTS >= 0) & kept & near


def begin(model: Transformer, cache: Cache, batch: int = 1) -> Stream:
    """Nothing read but the sink token, where a model has one."""
    sinks, shape = model.sink.count, model.model

    def room(tokens: int) -> Pairs:
        wide = shape.width if COMBINATIONS[shape.combination].wide else shape.head_width
        sizes = ((shape.layers, batch, tokens, shape.heads, width) for width in (shape.head_width, wide))
        return Pairs(*(jnp.zeros(size, model.dtype) for size in sizes))

    stream = Stream(jnp.int32(0), Kept(room(max(cache.first, sinks)), room(cache.recent)))
    nothing_BTD = jnp.zeros((batch, 0, shape.width), model.dtype)
    return advance(model, cache, stream, model.sink.attach(nothing_BTD))[1] if sinks else stream


def read(model: Transformer, cache: Cache, stream: Stream, token_BT: jax.Array) -> tuple[jax.Array, Stream]:
    """(hidden_BTD after the last norm, the stream with these tokens), all of them at once."""
    return advance(model, cache, stream, look_up(model.embedding_VD, token_BT, model.dtype))


def advance(model: Transformer, cache: Cache, stream: Stream, x_BTD: jax.Array) -> tuple[jax.Array, Stream]:
    time_BT = stream.time + jnp.arange(x_BTD.shape[1])[None]
    x_BTD = model.position.embed(x_BTD, jnp.minimum(time_BT, cache.size))

    def layer(x_BTD: jax.Array, given: tuple) -> tuple[jax.Array, Kept]:
        block, kept = given
        return block(x_BTD, Reading(cache, model.model, model.length, model.position, stream.time, kept))

    x_BTD, layers = jax.lax.scan(layer, x_BTD, (model.blocks, stream.layers))
    return model.norm(x_BTD), Stream(stream.time + x_BTD.shape[1], layers)


def is_of_distances(model: spec.Model) -> bool:
    """Whether a query and its keys may be moved together: not if what is rotated is mapped afterwards."""
    return model.attention.feature_map == 'identity' or POSITIONS[model.position].rotate is Position.rotate


def filled(first: Pairs, own: Pairs, time: jax.Array) -> Pairs:
    """The first tokens, with those of them that are read now."""
    tokens = own.key_BSHK.shape[1]
    place_S = jnp.arange(first.key_BSHK.shape[1]) - time
    is_own_S11 = ((place_S >= 0) & (place_S < tokens))[:, None, None]
    at_S = jnp.clip(place_S, 0, tokens - 1)
    return jax.tree.map(lambda before, now: jnp.where(is_own_S11, now[:, at_S], before), first, own)


def cut(tree: Tree, start: jax.Array | int, count: int) -> Tree:
    """So many places of each array, along its second axis."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, count, 1), tree)


def padded(tree: Tree, more: int) -> Tree:
    """With so many places more at the end."""
    return jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, more), (0, 0), (0, 0))), tree)
