"""Attention kernels for Hopper GPUs (Pallas, Mosaic GPU), with the contract of tpu.py.

A thread block has one block of queries or of keys, the outer one, and walks through the blocks of the others that it
meets: forward and for the gradient of queries these are keys, for the gradients of keys and values they are queries.
"""

import functools

import jax.numpy as jnp

from sinklab.attend.kernels import blocks
from sinklab.attend.kernels.gpu_block import make_block_ops
from sinklab.attend.kernels.gpu_kernel import forward_kernel, key_gradient_kernel, query_gradient_kernel
from sinklab.attend.kernels.gpu_lowering import find_unsupported_ops
from sinklab.attend.kernels.gpu_plan import INNER_BLOCKS, OUTER_BLOCK
from sinklab.attend.kernels.gpu_walk import KernelCall
from sinklab.attend.kernels.primitive import KernelSpec, ScoreSpec, Reduction


def get_padding_multiple(length: int) -> int:
    return OUTER_BLOCK


def explain_unsupported(reduction: Reduction, score_spec: ScoreSpec, query_BHTK, key_BGSK, value_BGSV) -> str | None:
    """None, or what these kernels cannot do."""
    width, value_width, widths = query_BHTK.shape[-1], value_BGSV.shape[-1], sorted(INNER_BLOCKS['forward'])
    if query_BHTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f'{query_BHTK.dtype} has no wgmma; use --attention=chunked'
    if len({array.dtype for array in (query_BHTK, key_BGSK, value_BGSV)}) > 1:
        return 'queries, keys and values of several dtypes'
    if width not in widths or value_width != width:
        return f'heads of {width} with values of {value_width}, where both must be one of {widths}'
    unsupported_ops = sorted(find_unsupported_ops(score_spec.bias_function, make_block_ops(reduction, score_spec).weigh_functions))
    return f'{", ".join(unsupported_ops)} inside of a kernel; use --attention=chunked' if unsupported_ops else None


def forward(reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV):
    """(output_BHTV in the dtype of queries, statistics_BHT)."""
    block_ops = make_block_ops(reduction, kernel_spec.score_spec)
    output_BHTV, *statistics = KernelCall('forward', block_ops, kernel_spec, query_BHTK, key_BGSK)(
        functools.partial(forward_kernel, block_ops),
        name=f'sinklab_{block_ops.name}_forward',
        outer=[query_BHTK],
        inner=[key_BGSK, value_BGSV],
        output_dtypes=[query_BHTK.dtype],
        num_row_outputs=reduction.num_statistics,
        takes_turns=True,
    )
    return output_BHTV, tuple(statistics)


def backward(reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT):
    """(d_query, d_key, d_value, d_parameter_HP)."""
    block_ops, parameter_HP = make_block_ops(reduction, kernel_spec.score_spec), kernel_spec.parameter_HP
    statistics = block_ops.scale_rows([row.astype(jnp.float32) for row in rows_BHT])
    query_arrays, key_arrays = [query_BHTK, d_output_BHTV.astype(value_BGSV.dtype)], [key_BGSK, value_BGSV]
    d_query, *d_parameters = KernelCall('query', block_ops, kernel_spec, query_BHTK, key_BGSK)(
        functools.partial(query_gradient_kernel, block_ops),
        name=f'sinklab_{block_ops.name}_backward_query',
        outer=query_arrays,
        inner=key_arrays,
        output_dtypes=[query_BHTK.dtype],
        num_row_outputs=parameter_HP.shape[1] if kernel_spec.score_spec.is_learned else 0,
        statistics=statistics,
    )
    d_key, d_value = KernelCall('key', block_ops, kernel_spec, query_BHTK, key_BGSK)(
        functools.partial(key_gradient_kernel, block_ops),
        name=f'sinklab_{block_ops.name}_backward_key',
        outer=key_arrays,
        inner=[*query_arrays, *statistics],
        output_dtypes=[key_BGSK.dtype, value_BGSV.dtype],
    )
    d_parameter_HP = jnp.zeros_like(parameter_HP)
    if d_parameters:
        d_parameter_HP = jnp.stack([row_BHT.sum((0, 2)) for row_BHT in d_parameters], -1)
    return d_query, blocks.sum_over_group(d_key, key_BGSK), blocks.sum_over_group(d_value, value_BGSV), d_parameter_HP
