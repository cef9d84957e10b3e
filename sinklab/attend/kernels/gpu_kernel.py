"""What a multiplying warpgroup of the GPU kernels does with each pair of blocks of its walk."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sinklab.attend.kernels.gpu_block import broadcast_to_block
from sinklab.attend.kernels.gpu_walk import WARPGROUP_ROWS, BlockPair, Warpgroup


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

    output_QV, rows = block_ops.finish(*warpgroup.loop_over_blocks(step, (make_zero_accumulator(query.shape), to_row_layout(block_ops.start(WARPGROUP_ROWS)))))
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
        rows = tuple(row + (d_score_QS * slope).sum(1) for row, slope in zip(rows, pair.compute_bias_slopes(positions), strict=True))
        total_QK = accumulate((total_QK,), (d_score_QS.astype(query.dtype), keys.buffer.at[slot]))[0]
        keys.release(slot)
        return total_QK, rows

    start = to_row_layout(jnp.zeros((WARPGROUP_ROWS,), jnp.float32) for _ in range(warpgroup.call.num_slopes))
    total_QK, rows = warpgroup.loop_over_blocks(step, (make_zero_accumulator(query.shape), start))
    warpgroup.write_outputs([block_ops.scores.scale * total_QK], rows)


def key_gradient_kernel(block_ops, warpgroup: Warpgroup) -> None:
    """Scores are transposed, so that they and what is multiplied with them stay in registers."""
    (key, value), (queries, d_outputs, *statistics) = warpgroup.outer, warpgroup.inner

    def step(pair: BlockPair, slot, carry):
        d_key, d_value = carry
        positions, row = pair.load_positions(), lambda n: broadcast_to_block(statistics[n].take(slot), pair.shape, 1)
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

    d_key, d_value = warpgroup.loop_over_blocks(step, (make_zero_accumulator(key.shape), make_zero_accumulator(value.shape)))
    warpgroup.write_outputs([block_ops.scores.scale * d_key, d_value], [])


def make_zero_accumulator(shape: tuple[int, int]):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def to_row_layout(rows) -> tuple:
    return tuple(plgpu.layout_cast(row, plgpu.Layout.WGMMA.reduce(1)) for row in rows)


def multiply(left, right, overlapped_work: Callable | None = None):
    """left @ right; `meanwhile` comes before its end is awaited."""

    def run(sum_ref):
        plgpu.wgmma(sum_ref, left, right)
        if overlapped_work is not None:
            overlapped_work()
        return sum_ref[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def accumulate(totals: Sequence[jax.Array], *factors):
    """total + left @ right for each total and (left, right)."""

    def run(total_refs):
        for total_ref, (left, right) in zip(total_refs, factors, strict=True):
            plgpu.wgmma(total_ref, left, right)

    return pl.run_state(run)(tuple(plgpu.ACC.init(total) for total in totals))
