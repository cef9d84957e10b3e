"""What a multiplying warpgroup of the GPU kernels does with each pair of blocks of its walk."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sinklab.attend.kernels.gpu_block import across
from sinklab.attend.kernels.gpu_walk import ROWS, Pair, Team


def attend(block, team: Team) -> None:
    (query,), (keys, values) = team.outer, team.inner

    def step(pair: Pair, slot, carry):
        total_QV, rows = carry
        places = pair.places()
        product_QS = multiplied(query, keys.wait(slot).transpose((1, 0)), team.meet)
        keys.free(slot)
        weight_QS, kept, rows = block.add(product_QS, rows, pair.bias(places), pair.hide)
        if kept is not None:
            total_QV *= across(kept, total_QV.shape, 0)
        weight_QS = weight_QS.astype(values.buffer.dtype)
        total_QV, rows, weight_QS = lax.optimization_barrier((total_QV, rows, weight_QS))
        total_QV = added((total_QV,), (weight_QS, team.meet(lambda: values.wait(slot))))[0]
        values.free(slot)
        return total_QV, rows

    output_QV, rows = block.finish(*team.walk(step, (block_of_zeros(query.shape), rows_of(block.start(ROWS)))))
    team.write([output_QV], rows)


def toward_queries(block, team: Team) -> None:
    (query, d_output), (keys, values) = team.outer, team.inner
    statistics = team.statistics()

    def step(pair: Pair, slot, carry):
        total_QK, rows = carry
        places, row = pair.places(), lambda n: across(statistics[n], pair.shape, 0)
        product_QS = multiplied(query, keys.wait(slot).transpose((1, 0)))
        _, differentiate = block.gradients(product_QS, pair.bias(places), row, pair.hide)
        d_weight_QS = multiplied(d_output, values.wait(slot).transpose((1, 0)))
        values.free(slot)
        d_score_QS = differentiate(d_weight_QS)
        rows = tuple(row + (d_score_QS * slope).sum(1) for row, slope in zip(rows, pair.slopes(places), strict=True))
        total_QK = added((total_QK,), (d_score_QS.astype(query.dtype), keys.buffer.at[slot]))[0]
        keys.free(slot)
        return total_QK, rows

    start = rows_of(jnp.zeros((ROWS,), jnp.float32) for _ in range(team.call.slopes))
    total_QK, rows = team.walk(step, (block_of_zeros(query.shape), start))
    team.write([block.scores.scale * total_QK], rows)


def toward_keys(block, team: Team) -> None:
    """Scores are transposed, so that they and what is multiplied with them stay in registers."""
    (key, value), (queries, d_outputs, *statistics) = team.outer, team.inner

    def step(pair: Pair, slot, carry):
        of_key, of_value = carry
        places, row = pair.places(), lambda n: across(statistics[n].take(slot), pair.shape, 1)
        query = queries.wait(slot)
        product_SQ = multiplied(key, query.transpose((1, 0)))
        weight_SQ, differentiate = block.gradients(product_SQ, pair.bias(places), row, pair.hide)
        d_output = d_outputs.wait(slot)
        of_value, d_weight_SQ = added(
            (of_value, block_of_zeros(product_SQ.shape)),
            (weight_SQ.astype(value.dtype), d_output),
            (value, d_output.transpose((1, 0))),
        )
        d_outputs.free(slot)
        d_score_SQ = differentiate(d_weight_SQ).astype(key.dtype)
        of_key = added((of_key,), (d_score_SQ, query))[0]
        queries.free(slot)
        return of_key, of_value

    of_key, of_value = team.walk(step, (block_of_zeros(key.shape), block_of_zeros(value.shape)))
    team.write([block.scores.scale * of_key, of_value], [])


def block_of_zeros(shape: tuple[int, int]):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def rows_of(rows) -> tuple:
    return tuple(plgpu.layout_cast(row, plgpu.Layout.WGMMA.reduce(1)) for row in rows)


def multiplied(left, right, meanwhile: Callable | None = None):
    """left @ right; `meanwhile` comes before its end is awaited."""

    def run(sum_ref):
        plgpu.wgmma(sum_ref, left, right)
        if meanwhile is not None:
            meanwhile()
        return sum_ref[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def added(totals: Sequence[jax.Array], *factors):
    """total + left @ right for each total and (left, right)."""

    def run(total_refs):
        for total_ref, (left, right) in zip(total_refs, factors, strict=True):
            plgpu.wgmma(total_ref, left, right)

    return pl.run_state(run)(tuple(plgpu.ACC.init(total) for total in totals))
