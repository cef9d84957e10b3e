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
from sinklab.attn.pallas.kernel_interface import (
    LOG2E,
    MASK_VALUE,
    KernelSpec,
    LinearReduction,
    Reduction,
    ScoreSpec,
    SoftmaxReduction,
)
from sinklab.attn.spec import AttentionProblem
from sinklab.chip_specs import NUM_LANES

NT_DIMS, NN_DIMS, TN_DIMS = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))  # contracting dimensions of a product


def dot(left, right, contracting_dims):
    return jax.lax.dot_general(left, right, (contracting_dims, ((), ())), preferred_element_type=jnp.float32)


def to_column(row):
    """Transpose a row of lanes to a column."""
    return jnp.transpose(jnp.broadcast_to(row, (NUM_LANES, row.shape[1])))[:, :1]


def repeat_lanes(column_Q1, width: int):
    """Repeat a column that fills NUM_LANES lanes to `width` lanes."""
    return jnp.tile(column_Q1, (1, -(-width // NUM_LANES)))[:, :width]


def sum_by_lane(array_QS):
    """Sum the columns that share a lane; `finish` sums over lanes once, at the end."""
    return sum(array_QS[:, start : start + NUM_LANES] for start in range(0, array_QS.shape[1], NUM_LANES))


class GridStep:
    """A grid step: its pair of blocks, and the range of keys that its queries see."""

    def __init__(self, call, scalars, parameter_HP, num_parameters: int, row_refs):
        self.call, self.row_refs = call, row_refs
        self.parameters = [parameter_HP[pl.program_id(1), p] for p in range(num_parameters)]
        _, outer_N, inner_N, edge_N, *per_sequence = scalars
        n = pl.program_id(2)
        self.kind, self.low, self.high = (
            scalar_N[call.get_pair_index(pl.program_id(0), n)] for scalar_N in per_sequence
        )
        self.edge = edge_N[n]
        self.is_first = n == 0
        self.is_last = n == call.grid[2] - 1
        self.query_block, self.key_block = (inner_N[n], outer_N[n]) if call.key_major else (outer_N[n], inner_N[n])

    def run(self, start: Callable, visit: Callable, finish: Callable) -> None:
        """Visit the visible subblocks of keys of this grid step.

        Args:
            start: Called before the first pair of an outer block.
            visit: Function (subblocks, masked), called for visible keys; `masked` says whether they need the mask.
            finish: Called after the last pair of an outer block.
        """
        subblock = self.call.subblock_keys
        size = self.call.block_sizes[1]

        def interior():
            visit([pl.ds(number * subblock, subblock) for number in range(size // subblock)], False)

        pl.when(self.edge & 1 != 0)(start)
        if self.call.plan.kinds == {block_plan.INTERIOR}:
            interior()
        else:
            pl.when(self.kind == block_plan.INTERIOR)(interior)
            visible_range = [jnp.clip(edge - self.key_block * size, 0, size) for edge in (self.low, self.high)]
            low = jax.lax.div(visible_range[0], subblock)
            high = pl.cdiv(visible_range[1], subblock)

            @pl.when(self.kind == block_plan.BOUNDARY)
            def _():
                jax.lax.fori_loop(
                    low, high, lambda number, _: visit([pl.ds(number * subblock, subblock)], True), None
                )

        pl.when(self.edge & 2 != 0)(finish)

    def compute_score(self, product, score_spec: ScoreSpec, keys: pl.Slice):
        score = score_spec.scale * product
        if score_spec.bias_function is not None:
            score += self.compute_bias(score_spec.bias_function, self.parameters, keys)
        return score + score_spec.offset if score_spec.offset else score

    def compute_bias(self, bias_function: Callable, parameters, keys: pl.Slice):
        query = self.row_refs[2][...]
        key = self.row_refs[3][:, keys]
        query, key = (query, to_column(key)) if self.call.key_major else (to_column(query), key)
        return bias_function(parameters, jnp.maximum(query - key, 0).astype(jnp.float32))

    def compute_mask(self, keys: pl.Slice):
        start, end = (row[...] for row in self.row_refs[:2])
        queries = self.call.block_sizes[0]
        first_key = self.key_block * self.call.block_sizes[1] + keys.start
        if self.call.key_major:
            key = first_key + jax.lax.broadcasted_iota(jnp.int32, (keys.size, queries), 0)
            return (start <= key) & (key < end)
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, (queries, keys.size), 1)
        return (to_column(start) <= key) & (key < to_column(end))


def split_refs(call, num_parameters: int, refs):
    """Return the grid step, and the refs of inputs, outputs and scratch."""
    scalars, (parameter_HP, *rest) = refs[: len(call.scalars)], refs[len(call.scalars) :]
    num_rows = len(call.row_inputs)
    return GridStep(call, scalars, parameter_HP, num_parameters, rest[:num_rows]), rest[num_rows:]


def forward_kernel(
    score_spec: ScoreSpec, block_ops: 'BlockOps', call, num_parameters: int, num_outputs: int, *refs
) -> None:
    step, (query, key, value, *rest) = split_refs(call, num_parameters, refs)
    (output, *statistics), scratch = rest[:num_outputs], rest[num_outputs:]

    def visit(subblocks, masked):
        for keys in subblocks:
            score = step.compute_score(dot(query[...], key[keys, :], NT_DIMS), score_spec, keys)
            block_ops.add(scratch, score, step.compute_mask(keys) if masked else None, value[keys, :])

    def finish():
        sum_QV, *statistic_columns = block_ops.finish(*scratch)
        output[...] = sum_QV.astype(output.dtype)
        for row, statistic_column in zip(statistics, statistic_columns, strict=True):
            row[...] = jnp.transpose(statistic_column)[:1]

    step.run(lambda: block_ops.start(*scratch), visit, finish)


class SoftmaxBlockOps:
    """Online softmax: o = sum e^(s - lse) v, and lse.

    In the forward pass, scores are multiplied by log2(e), so that weights are powers of two: e^x is computed as
    2^(log2(e) x), with a product for each score.
    """

    name, num_running_stats = 'softmax', 2  # statistics of rows that are carried from block to block
    score_factor = LOG2E  # of the scores that `add` takes

    def __init__(self, reduction: SoftmaxReduction):
        pass

    def start(self, sum_QV, largest_QL, total_QL):
        sum_QV[...] = jnp.zeros_like(sum_QV)
        largest_QL[...] = jnp.full_like(largest_QL, MASK_VALUE)
        total_QL[...] = jnp.zeros_like(total_QL)

    def add(self, scratch, score, visible, value):
        sum_QV, largest_QL, total_QL = scratch
        if visible is not None:
            score = jnp.where(visible, score, MASK_VALUE)
        old_max = largest_QL[...]
        new_max = jnp.maximum(old_max, jnp.max(score, 1, keepdims=True))
        rescale, weight = jnp.exp2(old_max - new_max), jnp.exp2(score - repeat_lanes(new_max, score.shape[1]))
        largest_QL[...] = new_max
        total_QL[...] = rescale * total_QL[...] + sum_by_lane(weight)
        product = dot(weight.astype(value.dtype), value, NN_DIMS)
        sum_QV[...] = repeat_lanes(rescale, sum_QV.shape[1]) * sum_QV[...] + product

    def finish(self, sum_QV, largest_QL, total_QL):
        """Return the output and lse; queries that saw no key get 0 and MASK_VALUE.

        The sums of such queries are of e^0 of hidden scores.
        """
        sees_keys = largest_QL[...] > MASK_VALUE / 2
        total = jnp.where(sees_keys, jnp.sum(total_QL[...], 1, keepdims=True), 1.0)
        width = sum_QV.shape[1]
        output = jnp.where(repeat_lanes(sees_keys, width), sum_QV[...] / repeat_lanes(total, width), 0.0)
        return output, jnp.where(sees_keys, largest_QL[...] / LOG2E + jnp.log(total), MASK_VALUE)

    def compute_weight_and_d_score(self, score_SQ, d_weight_SQ, lse_1Q, d_weight_offset_1Q):
        """Return (weight, dS); `d_weight_offset_1Q` is dlse - sum dO * O."""
        weight_SQ = jnp.exp(score_SQ - lse_1Q)
        return weight_SQ, weight_SQ * (d_weight_SQ + d_weight_offset_1Q)


class LinearBlockOps:
    """Linear reduction: sum w(s) v, and sum m(s) for each mass m."""

    name = 'linear'
    score_factor = 1.0

    def __init__(self, reduction: LinearReduction):
        self.weigh_and_sum, self.num_running_stats = reduction.weigh_and_sum, reduction.num_statistics

    def start(self, *scratch):
        for sums in scratch:
            sums[...] = jnp.zeros_like(sums)

    def add(self, scratch, score, visible, value):
        weight, masses = self.weigh_and_sum(score)
        sum_QV, *totals = scratch

        def hide(x):
            return x if visible is None else jnp.where(visible, x, 0.0)

        for total_QL, mass in zip(totals, masses, strict=True):
            total_QL[...] += sum_by_lane(hide(mass))
        sum_QV[...] += dot(hide(weight).astype(value.dtype), value, NN_DIMS)

    def finish(self, sum_QV, *totals):
        return sum_QV[...], *(
            jnp.broadcast_to(jnp.sum(total_QL[...], 1, keepdims=True), total_QL.shape) for total_QL in totals
        )

    def compute_weight_and_d_score(self, score_SQ, d_weight_SQ, *d_mass_1Q):
        """Return (weight, dS)."""
        (weight_SQ, masses), vjp = jax.vjp(self.weigh_and_sum, score_SQ)
        d_masses = type(masses)(jnp.broadcast_to(row, score_SQ.shape) for row in d_mass_1Q)
        return weight_SQ, vjp((d_weight_SQ, d_masses))[0]


BlockOps = SoftmaxBlockOps | LinearBlockOps
BLOCK_OPS = {SoftmaxReduction: SoftmaxBlockOps, LinearReduction: LinearBlockOps}


def make_block_ops(reduction: Reduction) -> BlockOps:
    return BLOCK_OPS[type(reduction)](reduction)


def backward_kernel(
    score_spec: ScoreSpec, block_ops: BlockOps, num_rows: int, call, num_parameters: int, num_outputs: int, *refs
) -> None:
    step, (query, key, value, d_output, *rest) = split_refs(call, num_parameters, refs)
    statistics, (d_query, d_key, d_value, d_parameter, *scratch) = rest[:num_rows], rest[num_rows:]
    d_query_sum, d_key_sum, d_value_sum = scratch
    queries = pl.ds(pl.multiple_of(step.query_block * call.block_sizes[0], NUM_LANES), call.block_sizes[0])

    @pl.when(step.is_first)
    def _():
        d_query_sum[...] = jnp.zeros_like(d_query_sum)
        d_parameter[...] = jnp.zeros_like(d_parameter)

    def start():
        d_key_sum[...] = jnp.zeros_like(d_key_sum)
        d_value_sum[...] = jnp.zeros_like(d_value_sum)

    def visit(subblocks, masked):
        d_query_sum[queries, :] += sum(add_subblock(keys, masked) for keys in subblocks)

    def add_subblock(keys, masked):
        def hide(x):
            return jnp.where(step.compute_mask(keys), x, 0.0) if masked else x

        score_SQ = step.compute_score(dot(key[keys, :], query[...], NT_DIMS), score_spec, keys)
        d_weight_SQ = dot(value[keys, :], d_output[...], NT_DIMS)
        weight_and_d_score = block_ops.compute_weight_and_d_score(
            score_SQ, d_weight_SQ, *(row[...] for row in statistics)
        )
        weight_SQ, d_score_SQ = map(hide, weight_and_d_score)
        d_value_sum[keys, :] += dot(weight_SQ.astype(d_output.dtype), d_output[...], NN_DIMS)
        if score_spec.is_learned:
            add_parameter_gradients(d_parameter, step, score_spec.bias_function, keys, d_score_SQ)
        d_score_SQ = d_score_SQ.astype(query.dtype)
        d_key_sum[keys, :] += dot(d_score_SQ, query[...], NN_DIMS)
        return dot(d_score_SQ, key[keys, :], TN_DIMS)

    def finish():
        d_key[...] = (score_spec.scale * d_key_sum[...]).astype(d_key.dtype)
        d_value[...] = d_value_sum[...].astype(d_value.dtype)

    step.run(start, visit, finish)

    @pl.when(step.is_last)
    def _():
        d_query[...] = (score_spec.scale * d_query_sum[...]).astype(d_query.dtype)


def add_parameter_gradients(d_parameter, step: GridStep, bias_function: Callable, keys: pl.Slice, d_score_SQ) -> None:
    """Add sum dS * d bias / d parameter, as a tile of partial sums for each parameter of the head."""
    parameters = step.parameters
    for p, parameter in enumerate(parameters):

        def evaluate_bias(x, p=p):
            return step.compute_bias(bias_function, [*parameters[:p], x, *parameters[p + 1 :]], keys)

        slope_SQ = jax.jvp(evaluate_bias, (parameter,), (jnp.ones_like(parameter),))[1]
        tiles = (d_score_SQ * slope_SQ).reshape(d_score_SQ.shape[0] // 8, 8, -1, NUM_LANES)
        d_parameter[8 * p : 8 * (p + 1), :] += tiles.sum((0, 2))


BLOCK_SIZES = 2048, 1024, 512, 256, 128  # keys of a block; blocks have at most half as many queries
KEYS_PER_SUBBLOCK = 256  # keys whose scores are computed at once
VMEM_LIMIT_BYTES = 100 * 2**20  # of the 128 MiB of v5e and v6e


def get_padding_multiple(length: int) -> int:
    """Return the largest block size whose padding is at most an eighth of `length`, or the smallest."""
    return next(size for size in BLOCK_SIZES if 8 * (-length % size) <= length or size == BLOCK_SIZES[-1])


def choose_block_size(length: int, max_size: int) -> int:
    """Return the largest block size up to `max_size` that divides a padded length."""
    return next(size for size in BLOCK_SIZES if size <= max_size and length % size == 0)


def explain_unsupported(reduction: Reduction, score_spec: ScoreSpec, problem: AttentionProblem) -> str | None:
    """Return what these kernels cannot compute, or None."""
    if problem.dtype not in ('bfloat16', 'float32'):
        return f'{problem.dtype} arrays: it needs bfloat16 or float32'
    if max(problem.width, problem.value_width) > 256:
        return f'heads wider than 256, here {max(problem.width, problem.value_width)}'
    if 8 * problem.num_queries * max(problem.width, NUM_LANES) > VMEM_LIMIT_BYTES // 2:
        return f'{problem.num_queries} queries: the gradient of one head does not fit in VMEM'
    return None


def forward(reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV):
    """Compute (output_BHTV, statistics_BHT), in float32."""
    call = KernelCall(kernel_spec, query_BHTK, key_BGSK, key_major=False)
    batch, heads, length, width = query_BHTK.shape
    value_width = value_BGSV.shape[-1]
    block_ops = make_block_ops(reduction)
    query_block, key_block = call.block_sizes
    row = (batch, heads, 1, length), jnp.float32, (1, query_block), call.index_outer_row
    output_BHTV, *row_outputs = call(
        functools.partial(forward_kernel, kernel_spec.score_spec * block_ops.score_factor, block_ops),
        name=f'sinklab_{block_ops.name}_forward',
        inputs=[
            (query_BHTK, (query_block, width), call.index_outer),
            (key_BGSK, (key_block, width), call.index_inner_group),
            (value_BGSV, (key_block, value_width), call.index_inner_group),
        ],
        outputs=[((batch, heads, length, value_width), jnp.float32, (query_block, value_width), call.index_outer)]
        + [row] * reduction.num_statistics,
        scratch=[(query_block, value_width), *[(query_block, NUM_LANES)] * block_ops.num_running_stats],
    )
    return output_BHTV, tuple(row[:, :, 0] for row in row_outputs)


def backward(
    reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT
):
    """Compute (d_query, d_key, d_value, d_parameter_HP)."""
    call = KernelCall(kernel_spec, query_BHTK, key_BGSK, key_major=True)
    (batch, heads, length, width), (_, _, num_keys, value_width) = query_BHTK.shape, value_BGSV.shape
    (query_block, key_block) = call.block_sizes
    num_parameters = kernel_spec.parameter_HP.shape[1]
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

    def __init__(self, kernel_spec: KernelSpec, query_BHTK, key_BGSK, key_major: bool):
        mask, positions = kernel_spec.mask, kernel_spec.positions
        max_query_block = max(BLOCK_SIZES[0] // 2, BLOCK_SIZES[-1])
        self.block_sizes = (
            choose_block_size(query_BHTK.shape[2], max_query_block),
            choose_block_size(key_BGSK.shape[2], BLOCK_SIZES[0]),
        )
        self.subblock_keys = min(KEYS_PER_SUBBLOCK, self.block_sizes[1])
        self.key_major = key_major
        self.plan = plan = block_plan.make_block_plan(mask, key_BGSK.shape[2], self.block_sizes, key_major)
        self.grid = (*query_BHTK.shape[:2], len(plan.outer_N))
        self.parameter_HP = kernel_spec.parameter_HP
        self.group_size = query_BHTK.shape[1] // key_BGSK.shape[1]
        self.has_batch_masks = len(plan.kind_BN) > 1
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
            (self.index_inner_row, self.index_outer_row)
            if self.key_major
            else (self.index_outer_row, self.index_inner_row)
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
