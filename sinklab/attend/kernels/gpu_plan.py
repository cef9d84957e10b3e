"""How GPU kernels divide their work: the size of blocks, and the walk through those that are seen. Plain jnp."""

import jax.numpy as jnp
import numpy as np

from sinklab.attend.kernels import blocks
from sinklab.attend.mask import Mask

OUTER_BLOCK = 128  # queries or keys of a thread block
INNER_BLOCKS = {  # of a step, by the width of a head: registers are what limits it
    'forward': {64: 128, 96: 128, 128: 128},
    'query': {64: 128, 96: 128, 128: 128},
    'key': {64: 128, 96: 64, 128: 64},
}


def choose_inner_block(direction: str, is_register_bound: bool, width: int) -> int:
    """Keys or queries of a step; fewer where a curve or the slopes of several masses crowd the registers."""
    return 64 if is_register_bound and direction != 'forward' else INNER_BLOCKS[direction][width]


def plan_segments(mask: Mask, num_keys: int, block_size: tuple[int, int], key_major: bool):
    """bound_BI4, and those (first, last, whether masked) of its bounds between which there is a block to visit.

    What is seen is between bounds 0 and 3 of its outer block, and whatever is between 1 and 2 is seen entirely.
    """
    xp = np if mask.is_static else jnp
    kind_BIJ, *_ = blocks.classify_blocks(xp, (mask.start_BT, mask.end_BT), num_keys, block_size)
    kind_BIJ = kind_BIJ.swapaxes(1, 2) if key_major else kind_BIJ
    is_visible, is_interior = kind_BIJ != blocks.HIDDEN, kind_BIJ == blocks.INTERIOR
    number_J, num_blocks = np.arange(is_visible.shape[2]), is_visible.shape[2]

    def find_first(condition_BIJ):
        return xp.where(condition_BIJ, number_J, num_blocks).min(-1)

    end_BI = xp.where(is_visible, number_J + 1, 0).max(-1)
    begin_BI = xp.minimum(find_first(is_visible), end_BI)
    inside_BI = xp.where(is_interior.any(-1), find_first(is_interior), end_BI if key_major else begin_BI)
    outside_BI = xp.minimum(find_first(~is_interior & (number_J >= inside_BI[..., None])), end_BI)
    bound_BI4 = xp.stack([begin_BI, inside_BI, outside_BI, end_BI], -1)
    segments = [(0, 1, True), (1, 2, False), (2, 3, True)]
    if mask.is_static:
        segments = [segment for segment in segments if (bound_BI4[..., segment[0]] < bound_BI4[..., segment[1]]).any()]
    return bound_BI4.astype(xp.int32), segments
