"""Attention a chunk of queries at a time: the definition, in memory that grows with T and not with its square."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sinklab.attend import dense
from sinklab.attend import mask as masks
from sinklab.attend.dense import Attended
from sinklab.attend.rule import Rule, part

CHUNK = 128  # queries whose scores are alive at once
STRIPES = 8  # parts of the queries; each reads those keys alone that its mask can show


def attend(query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, rule: Rule) -> Attended:
    """dense.attend, one chunk of its matrix after another, forward and backward."""
    length, columns = query_BTHK.shape[1], rule.columns
    queries = in_chunks(query_BTHK, rule)
    chunks, chunk = queries[0].shape[0], queries[0].shape[2]
    hull_2T = rule.mask.pad(after=chunks * chunk - length).hull_2T
    # Chunk after chunk adds to their gradients.
    wide = [array.astype(jnp.float32) for array in (key_BSGK, value_BSGK)]

    def stripe(first: int, last: int) -> tuple[jax.Array, dense.Rows]:
        """The chunks first..last, which see no text before key `low` and none from `high` on."""
        low, high = hull(hull_2T[:, first * chunk : last * chunk], key_BSGK.shape[1] - columns)
        key, value = (part(array, columns, low, high) for array in wide)
        keys = rule.cut(low, high)

        @jax.checkpoint
        def of_chunk(query, start_BT, end_BT, position_BT):
            arrays = query, key.astype(key_BSGK.dtype), value.astype(value_BSGK.dtype)
            return dense.attend(*arrays, chunk_rule(keys, start_BT - low, end_BT - low, position_BT, high - low))[:2]

        return jax.lax.map(lambda chunk: of_chunk(*chunk), [array[first:last] for array in queries])

    parts = [stripe(*edges) for edges in stripes(chunks)]
    output, rows = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    output_BTHK = checkpoint_name(join(output, 1, length), 'attention')
    return Attended(output_BTHK, jax.tree.map(lambda array: join(array, 2, length), rows))


def stripes(chunks: int) -> list[tuple[int, int]]:
    edges = np.unique(np.linspace(0, chunks, min(STRIPES, chunks) + 1).astype(int)).tolist()
    return list(itertools.pairwise(edges))


def hull(hull_2T: np.ndarray, keys: int) -> tuple[int, int]:
    """The first key that some query sees, and the one after the last; one key where none sees any."""
    start, end = hull_2T[:, hull_2T[0] < hull_2T[1]] if (hull_2T[0] < hull_2T[1]).any() else ([0], [1])
    return int(min(start)), int(min(max(end), keys))


def in_chunks(query_BTHK: jax.Array, rule: Rule, rows_BHT: Sequence[jax.Array] = ()) -> list[jax.Array]:
    """[query, start_BT, end_BT, position_BT, *rows] of chunks of queries, along a new first axis."""
    length = query_BTHK.shape[1]
    chunk = min(CHUNK, length)
    chunks = -(-length // chunk)
    position_BT = np.zeros((1, length), np.int32) if rule.bias.query_BT is None else rule.bias.query_BT
    mask = rule.mask.pad(after=chunks * chunk - length)

    def cut(array: jax.Array | np.ndarray, axis: int = 1) -> jax.Array:
        array, after = jnp.asarray(array), chunks * chunk - array.shape[axis]
        if after:
            array = jnp.pad(array, [(0, after if n == axis else 0) for n in range(array.ndim)])
        return jnp.moveaxis(array.reshape(*array.shape[:axis], chunks, chunk, *array.shape[axis + 1 :]), axis, 0)

    arrays = query_BTHK, mask.start_BT, mask.end_BT, position_BT
    return [cut(array) for array in arrays] + [cut(row_BHT, 2) for row_BHT in rows_BHT]


def chunk_rule(rule: Rule, start_BT: jax.Array, end_BT: jax.Array, position_BT: jax.Array, keys: int) -> Rule:
    """Of a chunk's queries."""
    bias = dataclasses.replace(rule.bias, query_BT=position_BT)
    return dataclasses.replace(rule, mask=masks.unknown(start_BT, end_BT, keys), bias=bias)


def join(array: jax.Array, axis: int, length: int) -> jax.Array:
    """The first `length` queries along an axis, from chunks along the first."""
    array = jnp.moveaxis(array, 0, axis)
    shape = (*array.shape[:axis], -1, *array.shape[axis + 2 :])
    return jax.lax.slice_in_dim(array.reshape(shape), 0, length, axis=axis)
