"""Chunked attention: reference attention for one chunk of queries at a time, with memory linear in T."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sinklab.attn import mask as masks
from sinklab.attn import reference
from sinklab.attn.reference import AttentionOutput
from sinklab.attn.spec import AttentionSpec, slice_keys

CHUNK_SIZE = 128  # queries whose scores are in memory at once
MAX_CHUNK_GROUPS = 8  # parts of the queries; each reads only the keys that its mask may show
MAX_UNROLLED_CHUNKS = 4  # number of chunks up to which each is a group of its own


def attend(query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, spec: AttentionSpec) -> AttentionOutput:
    """Compute `reference.attend` one chunk of queries at a time, forward and backward."""
    length = query_BTHK.shape[1]
    num_learned_kv = spec.num_learned_kv
    query_chunks = split_into_chunks(query_BTHK, spec, choose_chunk_size(length))
    num_chunks, chunk = query_chunks[0].shape[0], query_chunks[0].shape[2]
    bounds_2T = spec.mask.pad(after=num_chunks * chunk - length).bounds_2T
    # Gradients of keys and values are summed over chunks in float32.
    float32_arrays = [array.astype(jnp.float32) for array in (key_BSGK, value_BSGK)]

    def attend_chunk_group(first: int, last: int) -> tuple[jax.Array, reference.RowStats]:
        """Attend with the chunks [first, last), whose queries see only keys of the text in [low, high)."""
        low, high = find_key_range(bounds_2T[:, first * chunk : last * chunk], key_BSGK.shape[1] - num_learned_kv)
        key, value = (slice_keys(array, num_learned_kv, low, high) for array in float32_arrays)
        group_spec = spec.slice_text(low, high)

        def attend_chunk(query, start_BT, end_BT, position_BTH):
            arrays = query, key.astype(key_BSGK.dtype), value.astype(value_BSGK.dtype)
            return reference.attend(
                *arrays, make_chunk_spec(group_spec, start_BT - low, end_BT - low, position_BTH, high - low)
            )[:2]

        if last - first > 1:
            checkpointed = jax.checkpoint(attend_chunk)
            return jax.lax.map(lambda chunk: checkpointed(*chunk), [array[first:last] for array in query_chunks])
        # Without a loop, XLA computes a static mask when it compiles. The mask is not an argument of the checkpointed
        # function: with several chunks, barriers around its arguments keep XLA from storing all scores at once.
        query, *mask_and_position = (array[first] for array in query_chunks)
        checkpointed = jax.checkpoint(
            lambda query: attend_chunk(query, *mask_and_position), prevent_cse=num_chunks > 1
        )
        return jax.tree.map(lambda array: array[None], checkpointed(query))

    group_outputs = [attend_chunk_group(*edges) for edges in group_chunks(num_chunks)]
    output, row_stats = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *group_outputs)
    output_BTHK = checkpoint_name(join_chunks(output, 1, length), 'attention')
    return AttentionOutput(output_BTHK, jax.tree.map(lambda array: join_chunks(array, 2, length), row_stats))


def group_chunks(num_chunks: int) -> list[tuple[int, int]]:
    """Return the ranges [first, last) of the chunks of each group.

    A group of several chunks is a loop. XLA:CPU keeps the scores of all groups with only one chunk in memory at
    once, so that there are at most MAX_UNROLLED_CHUNKS of these.
    """
    num_groups = num_chunks if num_chunks <= MAX_UNROLLED_CHUNKS else min(MAX_CHUNK_GROUPS, num_chunks // 2)
    edges = np.linspace(0, num_chunks, num_groups + 1).astype(int).tolist()
    return list(itertools.pairwise(edges))


def choose_chunk_size(length: int) -> int:
    """Choose the number of queries of a chunk.

    It is half of CHUNK_SIZE where there would be too few chunks for MAX_CHUNK_GROUPS loops; each group would
    read many keys that its mask does not show.
    """
    num_chunks = -(-length // CHUNK_SIZE)
    is_half = MAX_UNROLLED_CHUNKS < num_chunks < 2 * MAX_CHUNK_GROUPS
    return min(CHUNK_SIZE // 2 if is_half else CHUNK_SIZE, length)


def find_key_range(bounds_2T: np.ndarray, num_keys: int) -> tuple[int, int]:
    """Return the range (start, end) of keys that some query sees; one key if no query sees any."""
    start, end = bounds_2T[:, bounds_2T[0] < bounds_2T[1]] if (bounds_2T[0] < bounds_2T[1]).any() else ([0], [1])
    return int(min(start)), int(min(max(end), num_keys))


def split_into_chunks(
    query_BTHK: jax.Array, spec: AttentionSpec, chunk_size: int, rows_BHT: Sequence[jax.Array] = ()
) -> list[jax.Array | np.ndarray]:
    """Split [query, start_BT, end_BT, position_BTH, *rows] into chunks of queries, along a new first axis.

    Arrays of NumPy, such as those of a static mask, stay arrays of NumPy.
    """
    length = query_BTHK.shape[1]
    num_chunks = -(-length // chunk_size)
    position_BTH = (
        np.zeros((1, length, 1), np.int32) if spec.bias.query_position_BTH is None else spec.bias.query_position_BTH
    )
    mask = spec.mask.pad(after=num_chunks * chunk_size - length)

    def split(array: jax.Array | np.ndarray, axis: int = 1) -> jax.Array | np.ndarray:
        xp = np if isinstance(array, np.ndarray) else jnp
        padding = num_chunks * chunk_size - array.shape[axis]
        if padding:
            array = xp.pad(array, [(0, padding if n == axis else 0) for n in range(array.ndim)])
        return xp.moveaxis(
            array.reshape(*array.shape[:axis], num_chunks, chunk_size, *array.shape[axis + 1 :]), axis, 0
        )

    arrays = query_BTHK, mask.start_BT, mask.end_BT, position_BTH
    return [split(array) for array in arrays] + [split(row_BHT, 2) for row_BHT in rows_BHT]


def make_chunk_spec(
    spec: AttentionSpec, start_BT: jax.Array, end_BT: jax.Array, position_BTH: jax.Array, num_keys: int
) -> AttentionSpec:
    """Return the attention spec of one chunk of queries."""
    bias = dataclasses.replace(spec.bias, query_position_BTH=position_BTH)
    return dataclasses.replace(spec, mask=masks.make_traced_mask(start_BT, end_BT, num_keys), bias=bias)


def join_chunks(array: jax.Array, axis: int, length: int) -> jax.Array:
    """Concatenate the chunks of the first axis along `axis`, and keep the first `length` queries."""
    array = jnp.moveaxis(array, 0, axis)
    shape = (*array.shape[:axis], -1, *array.shape[axis + 2 :])
    return jax.lax.slice_in_dim(array.reshape(shape), 0, length, axis=axis)
