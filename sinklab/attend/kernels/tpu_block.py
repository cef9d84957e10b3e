"""What the TPU kernels do with one pair of blocks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sinklab.attend.kernels import blocks
from sinklab.attend.kernels.primitive import NOTHING, Linear, Scores, Softmax, Sums

LANES = 128
BY_WIDTH, PLAIN, BY_ROWS = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))  # what a product sums over


def dot(left, right, contracted):
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)


def column(row):
    """A row of the lanes as a column."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:, :1]


def lanes(column_Q1, width: int):
    """A column that fills LANES lanes, as many lanes wide as asked for."""
    return jnp.tile(column_Q1, (1, -(-width // LANES)))[:, :width]


def partial_sum(array_QS):
    """Sums of the columns that share a lane: what is left to sum over is summed once, at the end."""
    return sum(array_QS[:, at : at + LANES] for at in range(0, array_QS.shape[1], LANES))


class Step:
    """A grid step: its pair of blocks, and what is shown of them."""

    def __init__(self, call, scalars, parameter_HP, parameters: int, rows):
        self.call, self.rows = call, rows
        self.parameters = [parameter_HP[pl.program_id(1), p] for p in range(parameters)]
        _, outer_N, inner_N, edge_N, *known = scalars
        n = pl.program_id(2)
        self.kind, self.low, self.high = (one[call.pair(pl.program_id(0), n)] for one in known)
        self.edge, self.first, self.last = edge_N[n], n == 0, n == call.grid[2] - 1
        self.query, self.key = (outer_N[n], inner_N[n]) if call.query_outer else (inner_N[n], outer_N[n])

    def run(self, start: Callable, visit: Callable, finish: Callable) -> None:
        """start() first in an outer block, visit(strips, masked) at what is seen, finish() last."""
        strip, size = self.call.strip, self.call.size[1]

        def interior():
            visit([pl.ds(number * strip, strip) for number in range(size // strip)], False)

        pl.when(self.edge & 1 != 0)(start)
        if self.call.plan.kinds == {blocks.INTERIOR}:
            interior()
        else:
            pl.when(self.kind == blocks.INTERIOR)(interior)
            seen = [jnp.clip(edge - self.key * size, 0, size) for edge in (self.low, self.high)]
            low, high = jax.lax.div(seen[0], strip), pl.cdiv(seen[1], strip)

            @pl.when(self.kind == blocks.BOUNDARY)
            def _():
                jax.lax.fori_loop(low, high, lambda number, _: visit([pl.ds(number * strip, strip)], True), None)

        pl.when(self.edge & 2 != 0)(finish)

    def score(self, product, scores: Scores, keys: pl.Slice):
        score = scores.scale * product
        if scores.curve is not None:
            score += self.curve(scores.curve, self.parameters, keys)
        return score + scores.offset if scores.offset else score

    def curve(self, curve: Callable, parameters, keys: pl.Slice):
        query, key = self.rows[2][...], self.rows[3][:, keys]
        query, key = (column(query), key) if self.call.query_outer else (query, column(key))
        return curve(parameters, jnp.maximum(query - key, 0).astype(jnp.float32))

    def visible(self, keys: pl.Slice):
        start, end = (row[...] for row in self.rows[:2])
        queries, first = self.call.size[0], self.key * self.call.size[1] + keys.start
        if self.call.query_outer:
            key = first + jax.lax.broadcasted_iota(jnp.int32, (queries, keys.size), 1)
            return (column(start) <= key) & (key < column(end))
        key = first + jax.lax.broadcasted_iota(jnp.int32, (keys.size, queries), 0)
        return (start <= key) & (key < end)


def split(call, parameters: int, refs):
    """(Step, what is left of the refs)."""
    scalars, (parameter_HP, *rest) = refs[: len(call.scalars)], refs[len(call.scalars) :]
    rows = len(call.rows)
    return Step(call, scalars, parameter_HP, parameters, rest[:rows]), rest[rows:]


def forward_kernel(scores: Scores, block: 'Block', call, parameters: int, made: int, *refs) -> None:
    step, (query, key, value, *rest) = split(call, parameters, refs)
    (output, *statistics), scratch = rest[:made], rest[made:]

    def visit(strips, masked):
        for keys in strips:
            score = step.score(dot(query[...], key[keys, :], BY_WIDTH), scores, keys)
            block.add(scratch, score, step.visible(keys) if masked else None, value[keys, :])

    def finish():
        sum_QV, *found = block.finish(*scratch)
        output[...] = sum_QV.astype(output.dtype)
        for row, one in zip(statistics, found, strict=True):
            row[...] = jnp.transpose(one)[:1]

    step.run(lambda: block.start(*scratch), visit, finish)


class SoftmaxBlock:
    """o = sum e^(s - lse) v and lse, online."""

    name, running = 'softmax', 2  # rows that are kept from block to block

    def __init__(self, sums: Softmax):
        pass

    def start(self, sum_QV, largest_QL, total_QL):
        sum_QV[...] = jnp.zeros_like(sum_QV)
        largest_QL[...] = jnp.full_like(largest_QL, NOTHING)
        total_QL[...] = jnp.zeros_like(total_QL)

    def add(self, scratch, score, visible, value):
        sum_QV, largest_QL, total_QL = scratch
        if visible is not None:
            score = jnp.where(visible, score, NOTHING)
        before = largest_QL[...]
        largest = jnp.maximum(before, jnp.max(score, 1, keepdims=True))
        kept, weight = jnp.exp(before - largest), jnp.exp(score - lanes(largest, score.shape[1]))
        largest_QL[...] = largest
        total_QL[...] = kept * total_QL[...] + partial_sum(weight)
        product = dot(weight.astype(value.dtype), value, PLAIN)
        sum_QV[...] = lanes(kept, sum_QV.shape[1]) * sum_QV[...] + product

    def finish(self, sum_QV, largest_QL, total_QL):
        """Queries that saw nothing have summed e^0 of hidden scores."""
        sees = largest_QL[...] > NOTHING / 2
        total = jnp.where(sees, jnp.sum(total_QL[...], 1, keepdims=True), 1.0)
        width = sum_QV.shape[1]
        output = jnp.where(lanes(sees, width), sum_QV[...] / lanes(total, width), 0.0)
        return output, jnp.where(sees, largest_QL[...] + jnp.log(total), NOTHING)

    def gradients(self, score_SQ, d_weight_SQ, lse_1Q, d_mass_1Q):
        """(weight, dS)."""
        weight_SQ = jnp.exp(score_SQ - lse_1Q)
        return weight_SQ, weight_SQ * (d_weight_SQ + d_mass_1Q)


class LinearBlock:
    """sum w(s) v, and sum m(s) for each mass."""

    name = 'linear'

    def __init__(self, sums: Linear):
        self.weigh, self.running = sums.weigh, sums.statistics

    def start(self, *scratch):
        for sums in scratch:
            sums[...] = jnp.zeros_like(sums)

    def add(self, scratch, score, visible, value):
        weight, masses = self.weigh(score)
        sum_QV, *totals = scratch

        def hide(x):
            return x if visible is None else jnp.where(visible, x, 0.0)

        for total_QL, mass in zip(totals, masses, strict=True):
            total_QL[...] += partial_sum(hide(mass))
        sum_QV[...] += dot(hide(weight).astype(value.dtype), value, PLAIN)

    def finish(self, sum_QV, *totals):
        return sum_QV[...], *(
            jnp.broadcast_to(jnp.sum(total_QL[...], 1, keepdims=True), total_QL.shape) for total_QL in totals
        )

    def gradients(self, score_SQ, d_weight_SQ, *d_mass_1Q):
        """(weight, dS)."""
        (weight_SQ, masses), pull = jax.vjp(self.weigh, score_SQ)
        d_masses = type(masses)(jnp.broadcast_to(row, score_SQ.shape) for row in d_mass_1Q)
        return weight_SQ, pull((d_weight_SQ, d_masses))[0]


Block = SoftmaxBlock | LinearBlock
BLOCKS = {Softmax: SoftmaxBlock, Linear: LinearBlock}


def block_of(sums: Sums) -> Block:
    return BLOCKS[type(sums)](sums)


def backward_kernel(scores: Scores, block: Block, row_count: int, call, parameters: int, made: int, *refs) -> None:
    step, (query, key, value, d_output, *rest) = split(call, parameters, refs)
    statistics, (d_query, d_key, d_value, d_parameter, *scratch) = rest[:row_count], rest[row_count:]
    of_query, of_key, of_value = scratch
    queries = pl.ds(pl.multiple_of(step.query * call.size[0], LANES), call.size[0])

    @pl.when(step.first)
    def _():
        of_query[...] = jnp.zeros_like(of_query)
        d_parameter[...] = jnp.zeros_like(d_parameter)

    def start():
        of_key[...] = jnp.zeros_like(of_key)
        of_value[...] = jnp.zeros_like(of_value)

    def visit(strips, masked):
        of_query[queries, :] += sum(add(keys, masked) for keys in strips)

    def add(keys, masked):
        def hide(x):
            return jnp.where(step.visible(keys), x, 0.0) if masked else x

        score_SQ = step.score(dot(key[keys, :], query[...], BY_WIDTH), scores, keys)
        d_weight_SQ = dot(value[keys, :], d_output[...], BY_WIDTH)
        found = block.gradients(score_SQ, d_weight_SQ, *(row[...] for row in statistics))
        weight_SQ, d_score_SQ = map(hide, found)
        of_value[keys, :] += dot(weight_SQ.astype(d_output.dtype), d_output[...], PLAIN)
        if scores.learned:
            add_parameters(d_parameter, step, scores.curve, keys, d_score_SQ)
        d_score_SQ = d_score_SQ.astype(query.dtype)
        of_key[keys, :] += dot(d_score_SQ, query[...], PLAIN)
        return dot(d_score_SQ, key[keys, :], BY_ROWS)

    def finish():
        d_key[...] = (scores.scale * of_key[...]).astype(d_key.dtype)
        d_value[...] = of_value[...].astype(d_value.dtype)

    step.run(start, visit, finish)

    @pl.when(step.last)
    def _():
        d_query[...] = (scores.scale * of_query[...]).astype(d_query.dtype)


def add_parameters(d_parameter, step: Step, curve: Callable, keys: pl.Slice, d_score_SQ) -> None:
    """sum dS * d curve / d parameter, as a tile of partial sums for each parameter of the head."""
    given = step.parameters
    for p, parameter in enumerate(given):

        def of_parameter(x, p=p):
            return step.curve(curve, [*given[:p], x, *given[p + 1 :]], keys)

        slope_SQ = jax.jvp(of_parameter, (parameter,), (jnp.ones_like(parameter),))[1]
        tiles = (d_score_SQ * slope_SQ).reshape(d_score_SQ.shape[0] // 8, 8, -1, LANES)
        d_parameter[8 * p : 8 * (p + 1), :] += tiles.sum((0, 2))
