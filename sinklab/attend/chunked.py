"""Attention a chunk of queries at a time: the definition, in memory that grows with T and not with its square."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from sinklab import spec
from sinklab.attend import dense
from sinklab.attend.bias import Bias
from sinklab.attend.mask import Mask

CHUNK = 128  # queries whose scores are alive at once
STRIPES = 8  # parts of the queries; each reads those keys alone that its mask can show


def attend(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    attention: spec.Attention,
    mask: Mask,
    columns: int = 0,
    bias: Bias = Bias(),  # noqa: B008
) -> tuple[jax.Array, dense.Rows]:
    """(output_BTHK, Rows): dense.attend, one chunk of its matrix after another, forward and backward."""
    length, keys = query_BTHK.shape[1], key_BSGK.shape[1] - columns
    chunk = min(CHUNK, length)
    chunks = -(-length // chunk)
    position_BT = np.zeros((1, length), np.int32) if bias.query_BT is None else bias.query_BT
    after = chunks * chunk - length
    mask = mask.padded(after=after)
    position_BT = jnp.pad(position_BT, ((0, 0), (0, after)))
    query_BTHK = jnp.pad(query_BTHK, ((0, 0), (0, after), (0, 0), (0, 0)))
    queries = [cut(array, chunks) for array in (query_BTHK, mask.start_BT, mask.end_BT, position_BT)]
    # Chunk after chunk adds to their gradients.
    wide = [array.astype(jnp.float32) for array in (key_BSGK, value_BSGK)]

    def stripe(first: int, last: int) -> tuple[jax.Array, dense.Rows]:
        """The chunks first..last, which see no text before key `low` and none from `high` on."""
        low, high = hull(mask.hull_2T[:, first * chunk : last * chunk], keys)
        key, value = (seen(array, columns, low, high) for array in wide)

        @jax.checkpoint
        def attended(query, start_BT, end_BT, position_BT):
            key_S = jnp.arange(low, high)
            visible_BTS = (start_BT[..., None] <= key_S) & (key_S < end_BT[..., None])
            bias_BHTS = bias.matrix(position_BT, columns, low, high)
            arrays = query, key.astype(key_BSGK.dtype), value.astype(value_BSGK.dtype)
            output, _, rows = dense.attended(*arrays, attention, visible_BTS, columns, bias_BHTS)
            return output, jax.lax.stop_gradient(rows)

        return jax.lax.map(lambda chunk: attended(*chunk), [array[first:last] for array in queries])

    parts = [stripe(*edges) for edges in stripes(chunks)]
    output, rows = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    joined = lambda array, axis: join(array, axis, length)  # noqa: E731
    return joined(output, 1), jax.tree.map(lambda array: joined(array, 2), rows)


def stripes(chunks: int) -> list[tuple[int, int]]:
    edges = np.unique(np.linspace(0, chunks, min(STRIPES, chunks) + 1).astype(int)).tolist()
    return list(itertools.pairwise(edges))


def hull(hull_2T: np.ndarray, keys: int) -> tuple[int, int]:
    """The first key that some query sees, and the one after the last; one key where none sees any."""
    start, end = hull_2T[:, hull_2T[0] < hull_2T[1]] if (hull_2T[0] < hull_2T[1]).any() else ([0], [1])
    return min(start), min(max(end), keys)


def seen(array_BSGK: jax.Array, columns: int, low: int, high: int) -> jax.Array:
    """The columns, and the keys low..high of the text."""
    text = array_BSGK[:, columns + low : columns + high]
    return jnp.concatenate([array_BSGK[:, :columns], text], 1) if columns else text


def cut(array_BT: jax.Array, chunks: int) -> jax.Array:
    """The queries in chunks along a new first axis."""
    array = jnp.asarray(array_BT)
    return jnp.moveaxis(array.reshape(len(array), chunks, -1, *array.shape[2:]), 1, 0)


def join(array: jax.Array, axis: int, length: int) -> jax.Array:
    """The first `length` queries along an axis, from chunks along the first."""
    array = jnp.moveaxis(array, 0, axis)
    shape = (*array.shape[:axis], -1, *array.shape[axis + 2 :])
    return jax.lax.slice_in_dim(array.reshape(shape), 0, length, axis=axis)
