"""TPU kernels (Pallas, Mosaic): forward and backward, over the pairs of a block plan.

In the forward pass, the rows of a block of scores are queries. Softmax is online, as in flash attention; the linear
reduction only adds. In the backward pass, the columns are queries, so that the statistics of queries are rows of
lanes. The whole dq of a head stays in VMEM in float32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sinklab.attn.pallas import block_plan
from sinklab.attn.pallas.primitive import KernelSpec, Reduction, ScoreSpec
from sinklab.attn.pallas.tpu_block import (
    NUM_LANES,
    backward_kernel,
    forward_kernel,
    make_block_ops,
)

BLOCK_SIZES = 2048, 1024, 512, 256, 128  # keys of a block; blocks have at most half as many queries
STRIP_KEYS = 256  # keys whose scores are computed at once
VMEM_LIMIT_BYTES = 100 * 2**20  # of the 128 MiB of v5e and v6e


def get_padding_multiple(length: int) -> int:
    """Return the largest block size whose padding is at most an eighth of `length`, or the smallest."""
    return next(size for size in BLOCK_SIZES if 8 * (-length % size) <= length or size == BLOCK_SIZES[-1])


def choose_block_size(length: int, max_size: int) -> int:
    """Return the largest block size up to `max_size` that divides a padded length."""
    return next(size for size in BLOCK_SIZES if size <= max_size and length % size == 0)


def explain_unsupported(reduction: Reduction, score_spec: ScoreSpec, query_BHTK, key_BGSK, value_BGSV) -> str | None:
    """Return what these kernels cannot compute, or None."""
    length, width = query_BHTK.shape[2:]
    if query_BHTK.dtype not in (jnp.bfloat16, jnp.float32):
        return f'{query_BHTK.dtype} scores'
    if max(width, value_BGSV.shape[-1]) > 256:
        return f'heads wider than 256, here {max(width, value_BGSV.shape[-1])}'
    if 8 * length * max(width, NUM_LANES) > VMEM_LIMIT_BYTES // 2:
        return f'{length} queries: the gradient of a head of them does not stay on the chip'
    return None


def forward(reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV):
    """Compute (output_BHTV, statistics_BHT), in float32."""
    call = KernelCall(block_plan.plan_by_query, kernel_spec, query_BHTK, key_BGSK)
    (batch, heads, length, width), value_width, block_ops = (
        query_BHTK.shape,
        value_BGSV.shape[-1],
        make_block_ops(reduction),
    )
    query_block, key_block = call.block_sizes
    row = (batch, heads, 1, length), jnp.float32, (1, query_block), call.index_outer_row
    output_BHTV, *row_outputs = call(
        functools.partial(forward_kernel, kernel_spec.score_spec, block_ops),
        name=f'sinklab_{block_ops.name}_forward',
        inputs=[
            (query_BHTK, (query_block, width), call.index_outer),
            (key_BGSK, (key_block, width), call.index_inner_group),
            (value_BGSV, (key_block, value_width), call.index_inner_group),
        ],
        outputs=[((batch, heads, length, value_width), jnp.float32, (query_block, value_width), call.index_outer)]
        + [row] * reduction.num_statistics,
        scratch=[(query_block, value_width), *[(query_block, NUM_LANES)] * block_ops.num_running_sums],
    )
    return output_BHTV, tuple(row[:, :, 0] for row in row_outputs)


def backward(
    reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT
):
    """Compute (d_query, d_key, d_value, d_parameter_HP)."""
    call = KernelCall(block_plan.plan_by_key, kernel_spec, query_BHTK, key_BGSK)
    (batch, heads, length, width), (_, _, num_keys, value_width) = query_BHTK.shape, value_BGSV.shape
    (query_block, key_block), num_parameters = call.block_sizes, kernel_spec.parameter_HP.shape[1]
    block_ops = make_block_ops(reduction)
    d_query, d_key, d_value, partial_BH8L = call(
        functools.partial(backward_kernel, kernel_spec.score_spec, block_ops, len(rows_BHT)),
        name=f'sinklab_{block_ops.name}_backward',
        inputs=[
            (query_BHTK, (query_block, width), call.index_inner),
            (key_BGSK, (key_block, width), call.index_outer_group),
            (value_BGSV, (key_block, value_width), call.index_outer_group),
            (d_output_BHTV, (query_block, value_width), call.index_inner),
            *((row_BHT[:, :, None], (1, query_block), call.index_inner_row) for row_BHT in rows_BHT),
        ],
        outputs=[
            (query_BHTK.shape, query_BHTK.dtype, (length, width), index_whole_head),
            ((batch, heads, num_keys, width), key_BGSK.dtype, (key_block, width), call.index_outer),
            ((batch, heads, num_keys, value_width), value_BGSV.dtype, (key_block, value_width), call.index_outer),
            ((batch, heads, 8 * max(num_parameters, 1), NUM_LANES), jnp.float32, None, index_whole_head),
        ],
        scratch=[(length, width), (key_block, width), (key_block, value_width)],
    )
    d_parameter_HP = partial_BH8L.reshape(batch, heads, -1, 8 * NUM_LANES).sum((0, 3))[:, :num_parameters]
    return (
        d_query,
        block_plan.sum_over_group(d_key, key_BGSK),
        block_plan.sum_over_group(d_value, value_BGSV),
        d_parameter_HP,
    )


def index_whole_head(b, h, n, *_):
    return b, h, 0, 0


class KernelCall:
    """A pallas_call with the grid (sequence, head, pair of blocks), and the index maps of its blocks."""

    def __init__(self, make_plan: Callable, kernel_spec: KernelSpec, query_BHTK, key_BGSK):
        mask, positions = kernel_spec.mask, kernel_spec.positions
        max_query_block = max(BLOCK_SIZES[0] // 2, BLOCK_SIZES[-1])
        self.block_sizes = (
            choose_block_size(query_BHTK.shape[2], max_query_block),
            choose_block_size(key_BGSK.shape[2], BLOCK_SIZES[0]),
        )
        self.strip_keys = min(STRIP_KEYS, self.block_sizes[1])
        self.plan = plan = make_plan(mask, key_BGSK.shape[2], self.block_sizes)
        self.query_major = make_plan is block_plan.plan_by_query
        self.grid = (*query_BHTK.shape[:2], len(plan.outer_N))
        self.parameter_HP = kernel_spec.parameter_HP
        self.group_size, self.has_batch_masks = query_BHTK.shape[1] // key_BGSK.shape[1], len(plan.kind_BN) > 1
        arrays = plan.fetch_BN, plan.outer_N, plan.inner_N, plan.edge_N, plan.kind_BN, plan.low_BN, plan.high_BN
        self.scalars = [jnp.asarray(array, jnp.int32).reshape(-1) for array in arrays]
        row_arrays = mask.start_BT, mask.end_BT, *(positions or ())
        self.row_inputs = (
            []
            if plan.kinds == {block_plan.INTERIOR} and not positions
            else [jnp.asarray(row, jnp.int32)[:, None] for row in row_arrays]
        )

    def get_pair_index(self, b, n):
        """Return the index of a pair of blocks in the flattened BN arrays of the block plan."""
        return b * self.grid[2] + n if self.has_batch_masks else n

    def index_outer(self, b, h, n, fetch, outer_N, *_):
        return b, h, outer_N[n], 0

    def index_outer_group(self, b, h, n, fetch, outer_N, *_):
        return b, jax.lax.div(h, self.group_size), outer_N[n], 0

    def index_outer_row(self, b, h, n, fetch, outer_N, *_):
        return b, h, 0, outer_N[n]

    def index_inner(self, b, h, n, fetch, *_):
        return b, h, fetch[self.get_pair_index(b, n)], 0

    def index_inner_group(self, b, h, n, *scalars):
        return b, jax.lax.div(h, self.group_size), self.index_inner(b, h, n, *scalars)[2], 0

    def index_inner_row(self, b, h, n, *scalars):
        return b, h, 0, self.index_inner(b, h, n, *scalars)[2]

    def make_row_specs(self) -> list[pl.BlockSpec]:
        """Make the block specs of start, end and position of queries, and of positions of keys."""
        query, key = (
            (self.index_outer_row, self.index_inner_row)
            if self.query_major
            else (self.index_inner_row, self.index_outer_row)
        )

        def make_block_spec(row, index, width):
            return pl.BlockSpec((None, 1, width), lambda b, *n: (b if len(row) > 1 else 0, 0, index(b, *n)[3]))

        layout = [(query, self.block_sizes[0])] * 3 + [(key, self.block_sizes[1])]
        return [
            make_block_spec(row, *index_and_width)
            for row, index_and_width in zip(self.row_inputs, layout, strict=False)
        ]

    def __call__(self, kernel: Callable, name: str, inputs, outputs, scratch) -> list[jax.Array]:
        """Run a kernel.

        Args:
            kernel: Kernel body, called with this object, the numbers of parameters and outputs, and refs.
            name: Name of the kernel in the compiled program.
            inputs: (array, block shape, index map) of each input.
            outputs: (shape, dtype, block shape or None for a whole head, index map) of each output.
            scratch: Shapes of buffers in VMEM, in float32.
        """

        def make_block_spec(block, index):
            return pl.BlockSpec((None, None, *block), index)

        return pl.pallas_call(
            functools.partial(kernel, self, self.parameter_HP.shape[1], len(outputs)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=self.grid,
                in_specs=[
                    pl.BlockSpec(memory_space=pltpu.SMEM),
                    *self.make_row_specs(),
                    *(make_block_spec(block, index) for _, block, index in inputs),
                ],
                out_specs=[make_block_spec(block or shape[2:], index) for shape, _, block, index in outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, *_ in outputs],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=VMEM_LIMIT_BYTES
            ),
            name=name,
        )(
            *self.scalars,
            self.parameter_HP if self.parameter_HP.size else jnp.zeros((1, 1)),
            *self.row_inputs,
            *(array_input[0] for array_input in inputs),
        )
