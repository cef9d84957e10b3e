"""Block plans: the pairs of query and key blocks that a kernel visits, and which need the mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attn.mask import Mask

# Kinds of a pair of query and key blocks: no query sees a key, every query sees every key, or neither.
HIDDEN, INTERIOR, BOUNDARY = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """N pairs of query and key blocks, grouped by outer block; every outer block occurs at least once."""

    outer_N: np.ndarray
    inner_N: np.ndarray
    kind_BN: jax.Array | np.ndarray  # B is 1 if all sequences have the same mask
    fetch_BN: jax.Array | np.ndarray  # the inner block to load; for a hidden pair, the block loaded last
    low_BN: jax.Array | np.ndarray  # no query of the pair sees a key before this key
    high_BN: jax.Array | np.ndarray  # no query of the pair sees this key or a later one
    kinds: frozenset[int]  # kinds that may occur

    @property
    def edge_N(self) -> np.ndarray:
        """1 for the first pair of an outer block, 2 for the last, 3 for both."""
        first = np.diff(self.outer_N, prepend=-1) != 0
        return (first + 2 * np.roll(first, -1)).astype(np.int32)


def make_block_plan(mask: Mask, num_keys: int, block_size: tuple[int, int], key_major: bool) -> BlockPlan:
    """Plan the pairs of blocks of a mask.

    Args:
        mask: Mask, whose number of queries is a multiple of the queries of a block.
        num_keys: Number of keys, a multiple of the keys of a block.
        block_size: (queries, keys) of a block.
        key_major: Whether the outer blocks are blocks of keys.
    """
    active_IJ = classify_blocks(np, mask.bounds_2T[:, None], num_keys, block_size)[0][0] != HIDDEN
    outer_first = active_IJ.T if key_major else active_IJ
    outer_first = outer_first | (~outer_first.any(1, keepdims=True) & (np.arange(outer_first.shape[1]) == 0))
    outer_N, inner_N = (index.astype(np.int32) for index in np.nonzero(outer_first))
    query_N, key_N = (inner_N, outer_N) if key_major else (outer_N, inner_N)
    xp = np if mask.is_static else jnp
    kind_BIJ, low_BI, high_BI = classify_blocks(xp, (mask.start_BT, mask.end_BT), num_keys, block_size)
    kind_BN = kind_BIJ[:, query_N, key_N]
    fetch_BN = xp.asarray(inner_N)[find_last_loaded(xp, kind_BN)]
    possible_kinds = (
        frozenset(np.unique(kind_BN).tolist()) if mask.is_static else frozenset((HIDDEN, INTERIOR, BOUNDARY))
    )
    return BlockPlan(outer_N, inner_N, kind_BN, fetch_BN, low_BI[:, query_N], high_BI[:, query_N], possible_kinds)


def classify_blocks(xp, edges, num_keys: int, block_size: tuple[int, int]):
    """Return kind_BIJ of all pairs of blocks, and low_BI and high_BI of all query blocks.

    `edges` are start_BT and end_BT of the mask.
    """
    start_BIQ, end_BIQ = (edge_BT.reshape(len(edge_BT), -1, block_size[0]) for edge_BT in edges)
    first_J = np.arange(0, num_keys, block_size[1])
    end_J = first_J + block_size[1]
    is_interior = (start_BIQ.max(-1)[..., None] <= first_J) & (end_J <= end_BIQ.min(-1)[..., None])
    sees_keys = start_BIQ < end_BIQ
    low_BI = xp.where(sees_keys, start_BIQ, num_keys).min(-1)
    high_BI = xp.where(sees_keys, end_BIQ, 0).max(-1)
    is_hidden = (high_BI[..., None] <= first_J) | (end_J <= low_BI[..., None])
    return xp.where(is_hidden, HIDDEN, xp.where(is_interior, INTERIOR, BOUNDARY)), low_BI, high_BI


def find_last_loaded(xp, kind_BN):
    """Return, for each pair, the index of the last pair up to it that is not hidden."""
    number_BN = xp.where(kind_BN != HIDDEN, np.arange(kind_BN.shape[-1]), 0)
    return np.maximum.accumulate(number_BN, -1) if xp is np else jax.lax.cummax(number_BN, 1)


def sum_over_group(d_BHSK: jax.Array, array_BGSK: jax.Array) -> jax.Array:
    """Sum the gradients of the query heads that share a key head, in float32."""
    if d_BHSK.shape == array_BGSK.shape:
        return d_BHSK
    (batch, num_groups) = array_BGSK.shape[:2]
    rest = d_BHSK.shape[2:]
    return d_BHSK.reshape(batch, num_groups, -1, *rest).astype(jnp.float32).sum(2).astype(d_BHSK.dtype)
