"""Attention kernels for Hopper GPUs (Pallas, Mosaic GPU), with the contract of tpu.py.

A thread block has one block of queries or of keys, the outer one, and walks through the blocks of the others that it
meets: forward and for the gradient of queries these are keys, for the gradients of keys and values they are queries.
"""

import functools

import jax.numpy as jnp

from sinklab.attend.kernels import blocks
from sinklab.attend.kernels.gpu_block import block_of
from sinklab.attend.kernels.gpu_kernel import attend, toward_keys, toward_queries
from sinklab.attend.kernels.gpu_lowering import unknown
from sinklab.attend.kernels.gpu_plan import INNER, OUTER
from sinklab.attend.kernels.gpu_walk import Call
from sinklab.attend.kernels.primitive import Problem, Scores, Sums


def block(length: int) -> int:
    return OUTER


def covers(sums: Sums, scores: Scores, query_BHTK, key_BGSK, value_BGSV) -> str | None:
    """None, or what these kernels cannot do."""
    width, value_width, widths = query_BHTK.shape[-1], value_BGSV.shape[-1], sorted(INNER['forward'])
    if query_BHTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f'{query_BHTK.dtype} has no wgmma; use --attention=chunked'
    if len({array.dtype for array in (query_BHTK, key_BGSK, value_BGSV)}) > 1:
        return 'queries, keys and values of several dtypes'
    if width not in widths or value_width != width:
        return f'heads of {width} with values of {value_width}, where both must be one of {widths}'
    strange = sorted(unknown(scores.curve, block_of(sums, scores).functions))
    return f'{", ".join(strange)} inside of a kernel; use --attention=chunked' if strange else None


def forward(sums: Sums, problem: Problem, query_BHTK, key_BGSK, value_BGSV):
    """(output_BHTV in the dtype of queries, statistics_BHT)."""
    block = block_of(sums, problem.scores)
    output_BHTV, *statistics = Call('forward', block, problem, query_BHTK, key_BGSK)(
        functools.partial(attend, block),
        name=f'sinklab_{block.name}_forward',
        outer=[query_BHTK],
        inner=[key_BGSK, value_BGSV],
        made=[query_BHTK.dtype],
        rows=sums.statistics,
        turns=True,
    )
    return output_BHTV, tuple(statistics)


def backward(sums: Sums, problem: Problem, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT):
    """(d_query, d_key, d_value, d_parameter_HP)."""
    block, parameter_HP = block_of(sums, problem.scores), problem.parameter_HP
    statistics = block.scaled([row.astype(jnp.float32) for row in rows_BHT])
    of_query, of_key = [query_BHTK, d_output_BHTV.astype(value_BGSV.dtype)], [key_BGSK, value_BGSV]
    d_query, *d_parameters = Call('query', block, problem, query_BHTK, key_BGSK)(
        functools.partial(toward_queries, block),
        name=f'sinklab_{block.name}_backward_query',
        outer=of_query,
        inner=of_key,
        made=[query_BHTK.dtype],
        rows=parameter_HP.shape[1] if problem.scores.learned else 0,
        statistics=statistics,
    )
    d_key, d_value = Call('key', block, problem, query_BHTK, key_BGSK)(
        functools.partial(toward_keys, block),
        name=f'sinklab_{block.name}_backward_key',
        outer=of_key,
        inner=[*of_query, *statistics],
        made=[key_BGSK.dtype, value_BGSV.dtype],
    )
    d_parameter_HP = jnp.zeros_like(parameter_HP)
    if d_parameters:
        d_parameter_HP = jnp.stack([row_BHT.sum((0, 2)) for row_BHT in d_parameters], -1)
    return d_query, blocks.by_group(d_key, key_BGSK), blocks.by_group(d_value, value_BGSV), d_parameter_HP
