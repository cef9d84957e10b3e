"""Attention kernels for TPU (Pallas, Mosaic), over the pairs of blocks of a plan.

Forward, rows of scores are queries: softmax is online, as in flash attention, and linear just adds. Backward, the
columns are, so that what is known of a query is a row of lanes; a head's whole dq stays on the chip in float32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sinklab.attend.kernels import blocks
from sinklab.attend.kernels.primitive import Problem, Scores, Sums
from sinklab.attend.kernels.tpu_block import LANES, backward_kernel, block_of, forward_kernel

BLOCKS = 2048, 1024, 512, 256, 128  # of keys, and of half as many queries; see `block`
STRIP = 256  # keys whose scores are alive at once
VMEM = 100 * 2**20  # of the 128 MiB of v5e and v6e


def block(length: int) -> int:
    """What so many queries or keys are padded to a multiple of: the largest block that adds an eighth at most."""
    return next(size for size in BLOCKS if 8 * (-length % size) <= length or size == BLOCKS[-1])


def dividing(length: int, most: int) -> int:
    """The largest block up to `most` that divides a padded length."""
    return next(size for size in BLOCKS if size <= most and length % size == 0)


def covers(sums: Sums, scores: Scores, query_BHTK, key_BGSK, value_BGSV) -> str | None:
    """None, or what these kernels cannot do."""
    length, width = query_BHTK.shape[2:]
    if query_BHTK.dtype not in (jnp.bfloat16, jnp.float32):
        return f'{query_BHTK.dtype} scores'
    if max(width, value_BGSV.shape[-1]) > 256:
        return f'heads wider than 256, here {max(width, value_BGSV.shape[-1])}'
    if 8 * length * max(width, LANES) > VMEM // 2:
        return f'{length} queries: the gradient of a head of them does not stay on the chip'
    return None


def forward(sums: Sums, problem: Problem, query_BHTK, key_BGSK, value_BGSV):
    """(output_BHTV, statistics_BHT), in float32."""
    call = Call(blocks.by_query, problem, query_BHTK, key_BGSK)
    (batch, heads, length, width), value_width, block = query_BHTK.shape, value_BGSV.shape[-1], block_of(sums)
    queries, keys = call.size
    row = (batch, heads, 1, length), jnp.float32, (1, queries), call.outer_row
    output_BHTV, *rows = call(
        functools.partial(forward_kernel, problem.scores, block),
        name=f'sinklab_{block.name}_forward',
        given=[
            (query_BHTK, (queries, width), call.outer),
            (key_BGSK, (keys, width), call.inner_group),
            (value_BGSV, (keys, value_width), call.inner_group),
        ],
        made=[((batch, heads, length, value_width), jnp.float32, (queries, value_width), call.outer)]
        + [row] * sums.statistics,
        scratch=[(queries, value_width), *[(queries, LANES)] * block.running],
    )
    return output_BHTV, tuple(row[:, :, 0] for row in rows)


def backward(sums: Sums, problem: Problem, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT):
    """(d_query, d_key, d_value, d_parameter_HP)."""
    call = Call(blocks.by_key, problem, query_BHTK, key_BGSK)
    (batch, heads, length, width), (_, _, count, value_width) = query_BHTK.shape, value_BGSV.shape
    (queries, keys), parameters = call.size, problem.parameter_HP.shape[1]
    block = block_of(sums)
    d_query, d_key, d_value, partial_BH8L = call(
        functools.partial(backward_kernel, problem.scores, block, len(rows_BHT)),
        name=f'sinklab_{block.name}_backward',
        given=[
            (query_BHTK, (queries, width), call.inner),
            (key_BGSK, (keys, width), call.outer_group),
            (value_BGSV, (keys, value_width), call.outer_group),
            (d_output_BHTV, (queries, value_width), call.inner),
            *((row_BHT[:, :, None], (1, queries), call.inner_row) for row_BHT in rows_BHT),
        ],
        made=[
            (query_BHTK.shape, query_BHTK.dtype, (length, width), whole_head),
            ((batch, heads, count, width), key_BGSK.dtype, (keys, width), call.outer),
            ((batch, heads, count, value_width), value_BGSV.dtype, (keys, value_width), call.outer),
            ((batch, heads, 8 * max(parameters, 1), LANES), jnp.float32, None, whole_head),
        ],
        scratch=[(length, width), (keys, width), (keys, value_width)],
    )
    d_parameter_HP = partial_BH8L.reshape(batch, heads, -1, 8 * LANES).sum((0, 3))[:, :parameters]
    return d_query, blocks.by_group(d_key, key_BGSK), blocks.by_group(d_value, value_BGSV), d_parameter_HP


def whole_head(b, h, n, *_):
    return b, h, 0, 0


class Call:
    """A pallas_call over (sequence, head, pair of blocks), and where the blocks of such a step lie."""

    def __init__(self, planned: Callable, problem: Problem, query_BHTK, key_BGSK):
        mask, positions = problem.mask, problem.positions
        most = max(BLOCKS[0] // 2, BLOCKS[-1])
        self.size = dividing(query_BHTK.shape[2], most), dividing(key_BGSK.shape[2], BLOCKS[0])
        self.strip = min(STRIP, self.size[1])
        self.plan = plan = planned(mask, key_BGSK.shape[2], self.size)
        self.query_outer = planned is blocks.by_query
        self.grid = (*query_BHTK.shape[:2], len(plan.outer_N))
        self.parameter_HP = problem.parameter_HP
        self.group, self.many = query_BHTK.shape[1] // key_BGSK.shape[1], len(plan.kind_BN) > 1
        arrays = plan.fetch_BN, plan.outer_N, plan.inner_N, plan.edge_N, plan.kind_BN, plan.low_BN, plan.high_BN
        self.scalars = [jnp.asarray(array, jnp.int32).reshape(-1) for array in arrays]
        needed = mask.start_BT, mask.end_BT, *(positions or ())
        self.rows = (
            []
            if plan.kinds == {blocks.INTERIOR} and not positions
            else [jnp.asarray(row, jnp.int32)[:, None] for row in needed]
        )

    def pair(self, b, n):
        """The number of a pair in what is known of each sequence."""
        return b * self.grid[2] + n if self.many else n

    def outer(self, b, h, n, fetch, outer_N, *_):
        return b, h, outer_N[n], 0

    def outer_group(self, b, h, n, fetch, outer_N, *_):
        return b, jax.lax.div(h, self.group), outer_N[n], 0

    def outer_row(self, b, h, n, fetch, outer_N, *_):
        return b, h, 0, outer_N[n]

    def inner(self, b, h, n, fetch, *_):
        return b, h, fetch[self.pair(b, n)], 0

    def inner_group(self, b, h, n, *scalars):
        return b, jax.lax.div(h, self.group), self.inner(b, h, n, *scalars)[2], 0

    def inner_row(self, b, h, n, *scalars):
        return b, h, 0, self.inner(b, h, n, *scalars)[2]

    def row_specs(self) -> list[pl.BlockSpec]:
        """Of start, end and position of queries, and of positions of keys."""
        query, key = (self.outer_row, self.inner_row) if self.query_outer else (self.inner_row, self.outer_row)

        def spec(row, index, width):
            return pl.BlockSpec((None, 1, width), lambda b, *n: (b if len(row) > 1 else 0, 0, index(b, *n)[3]))

        where = [(query, self.size[0])] * 3 + [(key, self.size[1])]
        return [spec(row, *one) for row, one in zip(self.rows, where, strict=False)]

    def __call__(self, kernel: Callable, name: str, given, made, scratch) -> list[jax.Array]:
        """`given`: (array, block, index), `made`: (shape, dtype, block or None for all of a head, index)."""

        def spec(block, index):
            return pl.BlockSpec((None, None, *block), index)

        return pl.pallas_call(
            functools.partial(kernel, self, self.parameter_HP.shape[1], len(made)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=self.grid,
                in_specs=[
                    pl.BlockSpec(memory_space=pltpu.SMEM),
                    *self.row_specs(),
                    *(spec(block, index) for _, block, index in given),
                ],
                out_specs=[spec(block or shape[2:], index) for shape, _, block, index in made],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, *_ in made],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=VMEM
            ),
            name=name,
        )(
            *self.scalars,
            self.parameter_HP if self.parameter_HP.size else jnp.zeros((1, 1)),
            *self.rows,
            *(one[0] for one in given),
        )
