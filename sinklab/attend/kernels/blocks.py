"""The plan of a kernel: which pairs of query and key blocks it visits, in which order, and which need the mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.mask import Mask

# Of a block of queries and one of keys: no query sees a key, every query sees every key, or some see some.
HIDDEN, INTERIOR, BOUNDARY = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """N pairs of blocks, those of one outer block side by side; every outer block is there at least once."""

    outer_N: np.ndarray
    inner_N: np.ndarray
    kind_BN: jax.Array | np.ndarray  # B is 1 where all sequences have one mask
    fetch_BN: jax.Array | np.ndarray  # the inner block to load: for a hidden pair the last one loaded
    low_BN: jax.Array | np.ndarray  # no query of the pair sees a key before this one
    high_BN: jax.Array | np.ndarray  # or from this one on
    kinds: frozenset[int]  # that can occur

    @property
    def edge_N(self) -> np.ndarray:
        """1 for the first pair of an outer block, 2 for the last, 3 for both."""
        first = np.diff(self.outer_N, prepend=-1) != 0
        return (first + 2 * np.roll(first, -1)).astype(np.int32)


def by_query(mask: Mask, keys: int, block: tuple[int, int]) -> Plan:
    return plan(mask, keys, block, transposed=False)


def by_key(mask: Mask, keys: int, block: tuple[int, int]) -> Plan:
    return plan(mask, keys, block, transposed=True)


def plan(mask: Mask, keys: int, block: tuple[int, int], transposed: bool) -> Plan:
    """`block` is (queries, keys), which divide those of the mask and `keys`; transposed: key blocks are the outer."""
    active_IJ = kinds(np, mask.hull_2T[:, None], keys, block)[0][0] != HIDDEN
    outer_first = active_IJ.T if transposed else active_IJ
    outer_first = outer_first | (~outer_first.any(1, keepdims=True) & (np.arange(outer_first.shape[1]) == 0))
    outer_N, inner_N = (index.astype(np.int32) for index in np.nonzero(outer_first))
    query_N, key_N = (inner_N, outer_N) if transposed else (outer_N, inner_N)
    module = np if mask.static else jnp
    kind_BIJ, low_BI, high_BI = kinds(module, (mask.start_BT, mask.end_BT), keys, block)
    kind_BN = kind_BIJ[:, query_N, key_N]
    fetch_BN = module.asarray(inner_N)[last_loaded(module, kind_BN)]
    occurring = frozenset(np.unique(kind_BN).tolist()) if mask.static else frozenset((HIDDEN, INTERIOR, BOUNDARY))
    return Plan(outer_N, inner_N, kind_BN, fetch_BN, low_BI[:, query_N], high_BI[:, query_N], occurring)


def kinds(module, edges, keys: int, block: tuple[int, int]):
    """kind_BIJ of every pair of blocks, low_BI and high_BI of every query block, from start_BT and end_BT."""
    start_BIQ, end_BIQ = (edge_BT.reshape(len(edge_BT), -1, block[0]) for edge_BT in edges)
    first_J = np.arange(0, keys, block[1])
    last_J = first_J + block[1]
    inside = (start_BIQ.max(-1)[..., None] <= first_J) & (last_J <= end_BIQ.min(-1)[..., None])
    sees = start_BIQ < end_BIQ
    low_BI, high_BI = module.where(sees, start_BIQ, keys).min(-1), module.where(sees, end_BIQ, 0).max(-1)
    outside = (high_BI[..., None] <= first_J) | (last_J <= low_BI[..., None])
    return module.where(outside, HIDDEN, module.where(inside, INTERIOR, BOUNDARY)), low_BI, high_BI


def last_loaded(module, kind_BN):
    """The number of the newest pair up to each that is not hidden."""
    number_BN = module.where(kind_BN != HIDDEN, np.arange(kind_BN.shape[-1]), 0)
    return np.maximum.accumulate(number_BN, -1) if module is np else jax.lax.cummax(number_BN, 1)


def by_group(d_BHSK: jax.Array, array_BGSK: jax.Array) -> jax.Array:
    """Gradients of the heads of a group in one."""
    if d_BHSK.shape == array_BGSK.shape:
        return d_BHSK
    (batch, groups), rest = array_BGSK.shape[:2], d_BHSK.shape[2:]
    return d_BHSK.reshape(batch, groups, -1, *rest).astype(jnp.float32).sum(2).astype(d_BHSK.dtype)
