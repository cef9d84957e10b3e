"""Attention kernels for Hopper GPUs (Pallas, Mosaic GPU), with the contract of tpu.py.

A thread block has one block of queries or of keys, the outer one, and walks through the blocks of the others that it
meets: forward and for the gradient of queries these are keys, for the gradients of keys and values they are queries.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend import blocks
from sinklab.attend.gpu_block import LOG2E, Linear, Softmax, sums, unknown
from sinklab.attend.mask import Mask
from sinklab.attend.primitive import Scores, Weigh

OUTER = 128  # queries or keys of a thread block
INNER = {  # of a step, by the width of a head: registers are what limits it
    'forward': {64: 128, 96: 128, 128: 128},
    'query': {64: 128, 96: 128, 128: 128},
    'key': {64: 128, 96: 64, 128: 64},
}


def block(length: int) -> int:
    return OUTER


def inner(direction: str, kind: Softmax | Linear, width: int) -> int:
    """Keys or queries of a step; fewer where a curve or the slopes of several masses fill the registers."""
    crowded = direction != 'forward' and (kind.statistics > 1 or kind.scores.curve is not None)
    return 64 if crowded else INNER[direction][width]


def covers(scores: Scores, weigh: Weigh | None, query_BHTK, key_BGSK, value_BGSV) -> str | None:
    """None, or what these kernels cannot do."""
    width, value_width, widths = query_BHTK.shape[-1], value_BGSV.shape[-1], sorted(INNER['forward'])
    if query_BHTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f'{query_BHTK.dtype} has no wgmma; use --attention=chunked'
    if len({array.dtype for array in (query_BHTK, key_BGSK, value_BGSV)}) > 1:
        return 'queries, keys and values of several dtypes'
    if width not in widths or value_width != width:
        return f'heads of {width} with values of {value_width}, where both must be one of {widths}'
    strange = sorted(unknown(scores.curve, weigh))
    return f'{", ".join(strange)} inside of a kernel; use --attention=chunked' if strange else None


def forward(
    scores: Scores, weigh: Weigh | None, query_BHTK, key_BGSK, value_BGSV, mask: Mask, positions, parameter_HP
):
    """(output_BHTV, statistics_BHT): softmax and its lse without `weigh`, else weighted values and sums of masses."""
    from sinklab.attend.gpu_kernel import attend
    from sinklab.attend.gpu_walk import Call

    kind = sums(scores, weigh)
    call = Call('forward', kind, query_BHTK, key_BGSK, mask, positions, parameter_HP)
    output, *statistics = call(
        lambda team: attend(kind, team),
        name=f'sinklab_{kind.name}_forward',
        outer=[query_BHTK],
        inner=[key_BGSK, value_BGSV],
        made=[query_BHTK.dtype],
        rows=kind.statistics,
        turns=True,
    )
    return output, tuple(statistics)


def backward(
    scores: Scores,
    weigh: Weigh | None,
    query_BHTK,
    key_BGSK,
    value_BGSV,
    mask: Mask,
    positions,
    parameter_HP,
    shift_BHT,
    d_output_BHTV,
    d_statistics: Sequence[jax.Array],
):
    """(d_query, d_key, d_value, d_parameter): dS = w' dO V^T + sum_n m_n' c_n, c being `d_statistics`."""
    from sinklab.attend.gpu_kernel import toward_keys, toward_queries
    from sinklab.attend.gpu_walk import Call

    kind = sums(scores, weigh)
    statistics = [*([] if shift_BHT is None else [LOG2E * shift_BHT]), *(d.astype(jnp.float32) for d in d_statistics)]
    arrays = kind, query_BHTK, key_BGSK, mask, positions, parameter_HP
    of_query, of_key = [query_BHTK, d_output_BHTV.astype(value_BGSV.dtype)], [key_BGSK, value_BGSV]
    d_query, *d_parameters = Call('query', *arrays)(
        lambda team: toward_queries(kind, team),
        name=f'sinklab_{kind.name}_backward_query',
        outer=of_query,
        inner=of_key,
        made=[query_BHTK.dtype],
        rows=parameter_HP.shape[1] if scores.learned else 0,
        statistics=statistics,
    )
    d_key, d_value = Call('key', *arrays)(
        lambda team: toward_keys(kind, team),
        name=f'sinklab_{kind.name}_backward_key',
        outer=of_key,
        inner=[*of_query, *statistics],
        made=[key_BGSK.dtype, value_BGSV.dtype],
    )
    d_parameter_HP = jnp.zeros_like(parameter_HP)
    if d_parameters:
        d_parameter_HP = jnp.stack([row_BHT.sum((0, 2)) for row_BHT in d_parameters], -1)
    return d_query, summed(d_key, key_BGSK), summed(d_value, value_BGSV), d_parameter_HP


def summed(d_BHSK, array_BGSK):
    """Over the heads of a group."""
    if d_BHSK.shape == array_BGSK.shape:
        return d_BHSK
    (batch, groups), rest = array_BGSK.shape[:2], d_BHSK.shape[2:]
    return d_BHSK.reshape(batch, groups, -1, *rest).astype(jnp.float32).sum(2).astype(d_BHSK.dtype)


def plan(mask: Mask, keys: int, size: tuple[int, int], by_key: bool):
    """bound_BI4, and those (first, last, whether masked) of its bounds between which there is a block to visit.

    What is seen is between bounds 0 and 3 of its outer block, and whatever is between 1 and 2 is seen entirely.
    """
    module = np if mask.static else jnp
    kind_BIJ, *_ = blocks.kinds(module, (mask.start_BT, mask.end_BT), keys, size)
    kind_BIJ = kind_BIJ.swapaxes(1, 2) if by_key else kind_BIJ
    seen, inside = kind_BIJ != blocks.HIDDEN, kind_BIJ == blocks.INTERIOR
    number_J, count = np.arange(seen.shape[2]), seen.shape[2]
    first = lambda chosen_BIJ: module.where(chosen_BIJ, number_J, count).min(-1)  # noqa: E731
    end_BI = module.where(seen, number_J + 1, 0).max(-1)
    begin_BI = module.minimum(first(seen), end_BI)
    inside_BI = module.where(inside.any(-1), first(inside), end_BI if by_key else begin_BI)
    outside_BI = module.minimum(first(~inside & (number_J >= inside_BI[..., None])), end_BI)
    bound_BI4 = module.stack([begin_BI, inside_BI, outside_BI, end_BI], -1)
    segments = [(0, 1, True), (1, 2, False), (2, 3, True)]
    if mask.static:
        segments = [one for one in segments if (bound_BI4[..., one[0]] < bound_BI4[..., one[1]]).any()]
    return bound_BI4.astype(module.int32), segments
