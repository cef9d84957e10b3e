"""How GPU kernels divide their work: the size of blocks, and the walk through those that are seen. Plain jnp."""

import jax.numpy as jnp
import numpy as np

from sinklab.attend.kernels import blocks
from sinklab.attend.mask import Mask

OUTER = 128  # queries or keys of a thread block
INNER = {  # of a step, by the width of a head: registers are what limits it
    'forward': {64: 128, 96: 128, 128: 128},
    'query': {64: 128, 96: 128, 128: 128},
    'key': {64: 128, 96: 64, 128: 64},
}


def inner(direction: str, crowded: bool, width: int) -> int:
    """Keys or queries of a step; fewer where a curve or the slopes of several masses crowd the registers."""
    return 64 if crowded and direction != 'forward' else INNER[direction][width]


def plan(mask: Mask, keys: int, size: tuple[int, int], by_key: bool):
    """bound_BI4, and those (first, last, whether masked) of its bounds between which there is a block to visit.

    What is seen is between bounds 0 and 3 of its outer block, and whatever is between 1 and 2 is seen entirely.
    """
    module = np if mask.static else jnp
    kind_BIJ, *_ = blocks.kinds(module, (mask.start_BT, mask.end_BT), keys, size)
    kind_BIJ = kind_BIJ.swapaxes(1, 2) if by_key else kind_BIJ
    seen, inside = kind_BIJ != blocks.HIDDEN, kind_BIJ == blocks.INTERIOR
    number_J, count = np.arange(seen.shape[2]), seen.shape[2]

    def first(chosen_BIJ):
        return module.where(chosen_BIJ, number_J, count).min(-1)

    end_BI = module.where(seen, number_J + 1, 0).max(-1)
    begin_BI = module.minimum(first(seen), end_BI)
    inside_BI = module.where(inside.any(-1), first(inside), end_BI if by_key else begin_BI)
    outside_BI = module.minimum(first(~inside & (number_J >= inside_BI[..., None])), end_BI)
    bound_BI4 = module.stack([begin_BI, inside_BI, outside_BI, end_BI], -1)
    segments = [(0, 1, True), (1, 2, False), (2, 3, True)]
    if mask.static:
        segments = [one for one in segments if (bound_BI4[..., one[0]] < bound_BI4[..., one[1]]).any()]
    return bound_BI4.astype(module.int32), segments
