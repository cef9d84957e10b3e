"""Kernels for Hopper GPUs (Pallas, Mosaic GPU): forward and backward.

A thread block has one outer block, of queries or of keys, and loops over the inner blocks that the mask does not
hide. The inner blocks are keys in the forward pass and for the gradient of queries, and queries for the gradients of
keys and values.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sinklab.attn.pallas import block_plan
from sinklab.attn.pallas.gpu_block import broadcast_to_block, make_block_ops
from sinklab.attn.pallas.gpu_lowering import find_unsupported_ops
from sinklab.attn.pallas.gpu_pipeline import (
    INNER_BLOCKS,
    OUTER_BLOCK,
    WARPGROUP_ROWS,
    BlockPair,
    KernelCall,
    Warpgroup,
)
from sinklab.attn.pallas.primitive import KernelSpec, Reduction, ScoreSpec


def get_padding_multiple(length: int) -> int:
    return OUTER_BLOCK


def explain_unsupported(reduction: Reduction, score_spec: ScoreSpec, query_BHTK, key_BGSK, value_BGSV) -> str | None:
    """Return what these kernels cannot compute, or None."""
    width, value_width, widths = query_BHTK.shape[-1], value_BGSV.shape[-1], sorted(INNER_BLOCKS['forward'])
    if query_BHTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f'{query_BHTK.dtype} has no wgmma; use --attention=chunked'
    if len({array.dtype for array in (query_BHTK, key_BGSK, value_BGSV)}) > 1:
        return 'queries, keys and values of several dtypes'
    if width not in widths or value_width != width:
        return f'heads of {width} with values of {value_width}, where both must be one of {widths}'
    unsupported_ops = sorted(
        find_unsupported_ops(score_spec.bias_function, make_block_ops(reduction, score_spec).weigh_functions)
    )
    return f'{", ".join(unsupported_ops)} inside of a kernel; use --attention=chunked' if unsupported_ops else None


def forward(reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV):
    """Compute output_BHTV, in the dtype of queries, and statistics_BHT."""
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


def backward(
    reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT
):
    """Compute (d_query, d_key, d_value, d_parameter_HP)."""
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
    return (
        d_query,
        block_plan.sum_over_group(d_key, key_BGSK),
        block_plan.sum_over_group(d_value, value_BGSV),
        d_parameter_HP,
    )


def forward_kernel(block_ops, warpgroup: Warpgroup) -> None:
    (query,), (keys, values) = warpgroup.outer, warpgroup.inner

    def step(pair: BlockPair, slot, carry):
        total_QV, rows = carry
        positions = pair.load_positions()
        product_QS = multiply(query, keys.wait(slot).transpose((1, 0)), warpgroup.take_turns)
        keys.release(slot)
        weight_QS, rescale, rows = block_ops.add(product_QS, rows, pair.compute_bias(positions), pair.apply_mask)
        if rescale is not None:
            total_QV *= broadcast_to_block(rescale, total_QV.shape, 0)
        weight_QS = weight_QS.astype(values.buffer.dtype)
        total_QV, rows, weight_QS = lax.optimization_barrier((total_QV, rows, weight_QS))
        total_QV = accumulate((total_QV,), (weight_QS, warpgroup.take_turns(lambda: values.wait(slot))))[0]
        values.release(slot)
        return total_QV, rows

    output_QV, rows = block_ops.finish(
        *warpgroup.loop_over_blocks(
            step, (make_zero_accumulator(query.shape), to_row_layout(block_ops.start(WARPGROUP_ROWS)))
        )
    )
    warpgroup.write_outputs([output_QV], rows)


def query_gradient_kernel(block_ops, warpgroup: Warpgroup) -> None:
    (query, d_output), (keys, values) = warpgroup.outer, warpgroup.inner
    statistics = warpgroup.load_statistics()

    def step(pair: BlockPair, slot, carry):
        total_QK, rows = carry
        positions, row = pair.load_positions(), lambda n: broadcast_to_block(statistics[n], pair.shape, 0)
        product_QS = multiply(query, keys.wait(slot).transpose((1, 0)))
        _, differentiate = block_ops.gradients(product_QS, pair.compute_bias(positions), row, pair.apply_mask)
        d_weight_QS = multiply(d_output, values.wait(slot).transpose((1, 0)))
        values.release(slot)
        d_score_QS = differentiate(d_weight_QS)
        rows = tuple(
            row + (d_score_QS * slope).sum(1)
            for row, slope in zip(rows, pair.compute_bias_slopes(positions), strict=True)
        )
        total_QK = accumulate((total_QK,), (d_score_QS.astype(query.dtype), keys.buffer.at[slot]))[0]
        keys.release(slot)
        return total_QK, rows

    start = to_row_layout(jnp.zeros((WARPGROUP_ROWS,), jnp.float32) for _ in range(warpgroup.call.num_slopes))
    total_QK, rows = warpgroup.loop_over_blocks(step, (make_zero_accumulator(query.shape), start))
    warpgroup.write_outputs([block_ops.score_spec.scale * total_QK], rows)


def key_gradient_kernel(block_ops, warpgroup: Warpgroup) -> None:
    """Compute gradients of keys and values, with scores transposed to keep left operands in registers."""
    (key, value), (queries, d_outputs, *statistics) = warpgroup.outer, warpgroup.inner

    def step(pair: BlockPair, slot, carry):
        d_key, d_value = carry
        positions, row = (
            pair.load_positions(),
            lambda n: broadcast_to_block(statistics[n].take_row(slot), pair.shape, 1),
        )
        query = queries.wait(slot)
        product_SQ = multiply(key, query.transpose((1, 0)))
        weight_SQ, differentiate = block_ops.gradients(product_SQ, pair.compute_bias(positions), row, pair.apply_mask)
        d_output = d_outputs.wait(slot)
        d_value, d_weight_SQ = accumulate(
            (d_value, make_zero_accumulator(product_SQ.shape)),
            (weight_SQ.astype(value.dtype), d_output),
            (value, d_output.transpose((1, 0))),
        )
        d_outputs.release(slot)
        d_score_SQ = differentiate(d_weight_SQ).astype(key.dtype)
        d_key = accumulate((d_key,), (d_score_SQ, query))[0]
        queries.release(slot)
        return d_key, d_value

    d_key, d_value = warpgroup.loop_over_blocks(
        step, (make_zero_accumulator(key.shape), make_zero_accumulator(value.shape))
    )
    warpgroup.write_outputs([block_ops.score_spec.scale * d_key, d_value], [])


def make_zero_accumulator(shape: tuple[int, int]):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def to_row_layout(rows) -> tuple:
    return tuple(plgpu.layout_cast(row, plgpu.Layout.WGMMA.reduce(1)) for row in rows)


def multiply(left, right, overlapped_work: Callable | None = None):
    """Return left @ right; call `overlapped_work` while the tensor cores multiply."""

    def run(sum_ref):
        plgpu.wgmma(sum_ref, left, right)
        if overlapped_work is not None:
            overlapped_work()
        return sum_ref[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def accumulate(totals: Sequence[jax.Array], *factors):
    """Return total + left @ right for each total and (left, right)."""

    def run(total_refs):
        for total_ref, (left, right) in zip(total_refs, factors, strict=True):
            plgpu.wgmma(total_ref, left, right)

    return pl.run_state(run)(tuple(plgpu.ACC.init(total) for total in totals))
