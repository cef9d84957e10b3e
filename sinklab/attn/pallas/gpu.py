"""Kernels for Hopper GPUs (Pallas, Mosaic GPU): forward and backward.

A thread block has one outer block, of queries or of keys, and loops over the inner blocks that the mask does not
hide. The inner blocks are keys in the forward pass and for the gradient of queries, and queries for the gradients of
keys and values.

A thread block has three warpgroups. Two of them multiply, each with half of the outer block. The third loads the
inner blocks, in the order in which the other two use them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sinklab.attn.mask import Mask
from sinklab.attn.pallas import block_plan
from sinklab.attn.pallas.gpu_lowering import (
    find_unsupported_ops,
    make_lowerable,
    value_and_derivative,
)
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


def broadcast_to_block(row, shape: tuple[int, int], axis: int):
    """Repeat a row or a column to fill a block."""
    return lax.broadcast_in_dim(row, shape, (axis,))


class SoftmaxBlockOps:
    """Online softmax in powers of two: o = sum e^(s - lse) v, and lse."""

    name, weigh_functions = 'softmax', ()  # no weigh functions for `find_unsupported_ops` to check

    def __init__(self, reduction: SoftmaxReduction, score_spec: ScoreSpec):
        self.score_spec = score_spec
        self.scale = score_spec.scale * LOG2E
        self.is_register_bound = score_spec.bias_function is not None

    def scale_rows(self, rows):
        lse, d_weight_offset = rows
        return [LOG2E * lse, d_weight_offset]

    def start(self, num_queries: int):
        """Return the initial (largest score, total) of each query."""
        return jnp.full((num_queries,), MASK_VALUE, jnp.float32), jnp.zeros((num_queries,), jnp.float32)

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        """Return (weight_QS, factor that rescales earlier sums, new rows)."""
        (old_max, total) = rows
        score = product_QS
        scale = self.scale
        if bias_QS is not None or scale <= 0:  # otherwise the multiply-add of the exponential applies the scale
            score = self.scale * product_QS
            scale = 1.0
        if bias_QS is not None:
            score += LOG2E * bias_QS
        score = hide(score, -jnp.inf)
        new_max = jnp.maximum(old_max, scale * score.max(1))
        weight_QS = jnp.exp2(scale * score - broadcast_to_block(new_max, score.shape, 0))
        rescale = jnp.exp2(old_max - new_max)
        return weight_QS, rescale, (new_max, rescale * total + weight_QS.sum(1))

    def finish(self, sum_QV, rows):
        largest, total = rows
        sees_keys = total > 0
        total = jnp.where(sees_keys, total, 1.0)
        output_QV = sum_QV * broadcast_to_block(1 / total, sum_QV.shape, 0)
        return output_QV, [
            jnp.where(sees_keys, (largest + jnp.log2(total)) / LOG2E + self.score_spec.offset, MASK_VALUE)
        ]

    def compute_weight_and_vjp(self, product, bias, row: Callable, hide: Callable):
        """Return (weight, function dA -> dS).

        row(0) is lse in powers of two and row(1) is dlse - sum dO * O, both broadcast to the scores.
        """
        score = self.scale * product - (row(0) - LOG2E * self.score_spec.offset)
        weight = hide(jnp.exp2(score if bias is None else score + LOG2E * bias), 0.0)
        return weight, lambda d_weight: weight * (d_weight + row(1))


class LinearBlockOps:
    """Linear reduction: sum w(s) v, and sum m(s) for each mass m."""

    name = 'linear'

    def __init__(self, reduction: LinearReduction, score_spec: ScoreSpec):
        self.score_spec = score_spec
        self.weigh_and_sum = reduction.weigh_by_logistic or reduction.weigh_and_sum
        self.weigh_functions = (self.weigh_and_sum,)
        self.num_statistics = reduction.num_statistics
        # See `choose_inner_block`.
        self.is_register_bound = self.num_statistics > 1 or score_spec.bias_function is not None

    def scale_rows(self, rows):
        return rows

    def compute_score(self, product, bias):
        score = product if self.score_spec.scale == 1 else self.score_spec.scale * product
        score = score if bias is None else score + bias
        return score + self.score_spec.offset if self.score_spec.offset else score

    def apply(self, function: Callable, product, bias):
        """Return function(score), in primitives that Mosaic GPU can lower."""
        return make_lowerable(function)(self.compute_score(product, bias))

    def start(self, num_queries: int):
        return tuple(jnp.zeros((num_queries,), jnp.float32) for _ in range(self.num_statistics))

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        weight_QS, masses = self.apply(self.weigh_and_sum, product_QS, bias_QS)
        sums = tuple(row + hide(mass, 0.0).sum(1) for row, mass in zip(rows, masses, strict=True))
        return hide(weight_QS, 0.0), None, sums

    def finish(self, sum_QV, rows):
        return sum_QV, list(rows)

    def compute_weight_and_vjp(self, product, bias, row: Callable, hide: Callable):
        """Return (weight, function dA -> dS); row(n) is the cotangent of mass n, broadcast to the scores."""
        slopes = functools.partial(value_and_derivative, self.weigh_and_sum)
        (weight, _), (slope, mass_slopes) = self.apply(slopes, product, bias)
        same_as_weight = [n for n, mass_slope in enumerate(mass_slopes) if mass_slope is slope]
        constant_terms = [row(n) * mass_slope for n, mass_slope in enumerate(mass_slopes) if n not in same_as_weight]

        def differentiate(d_weight):
            d_score = slope * sum(map(row, same_as_weight), d_weight)
            return hide(sum(constant_terms, d_score), 0.0)

        return hide(weight, 0.0), differentiate


BLOCK_OPS = {SoftmaxReduction: SoftmaxBlockOps, LinearReduction: LinearBlockOps}


def make_block_ops(reduction: Reduction, score_spec: ScoreSpec) -> SoftmaxBlockOps | LinearBlockOps:
    return BLOCK_OPS[type(reduction)](reduction, score_spec)


OUTER_BLOCK = 128  # queries or keys of a thread block
INNER_BLOCKS = {  # rows of an inner block, by direction and head width; the number of registers limits them
    'forward': {64: 128, 96: 128, 128: 128},
    'query': {64: 128, 96: 128, 128: 128},
    'key': {64: 128, 96: 64, 128: 64},
}


def choose_inner_block(direction: str, is_register_bound: bool, width: int) -> int:
    """Return the rows of an inner block: fewer if a bias or slopes of several masses need registers."""
    return 64 if is_register_bound and direction != 'forward' else INNER_BLOCKS[direction][width]


def plan_inner_block_ranges(mask: Mask, num_keys: int, block_size: tuple[int, int], key_major: bool):
    """Return bound_BI4, and the ranges (first bound, last bound, is_masked) of blocks to visit.

    Blocks with visible keys are between bounds 0 and 3 of their outer block; those between 1 and 2 need no mask.
    """
    xp = np if mask.is_static else jnp
    kind_BIJ, *_ = block_plan.classify_blocks(xp, (mask.start_BT, mask.end_BT), num_keys, block_size)
    kind_BIJ = kind_BIJ.swapaxes(1, 2) if key_major else kind_BIJ
    is_visible, is_interior = kind_BIJ != block_plan.HIDDEN, kind_BIJ == block_plan.INTERIOR
    number_J = np.arange(is_visible.shape[2])
    num_blocks = is_visible.shape[2]

    def find_first(condition_BIJ):
        return xp.where(condition_BIJ, number_J, num_blocks).min(-1)

    end_BI = xp.where(is_visible, number_J + 1, 0).max(-1)
    begin_BI = xp.minimum(find_first(is_visible), end_BI)
    inside_BI = xp.where(is_interior.any(-1), find_first(is_interior), end_BI if key_major else begin_BI)
    outside_BI = xp.minimum(find_first(~is_interior & (number_J >= inside_BI[..., None])), end_BI)
    bound_BI4 = xp.stack([begin_BI, inside_BI, outside_BI, end_BI], -1)
    ranges = [(0, 1, True), (1, 2, False), (2, 3, True)]
    if mask.is_static:
        ranges = [span for span in ranges if (bound_BI4[..., span[0]] < bound_BI4[..., span[1]]).any()]
    return bound_BI4.astype(xp.int32), ranges


WARPGROUP_ROWS = OUTER_BLOCK // 2  # rows of the outer block for one warpgroup: those of one wgmma
NUM_STAGES = 2  # inner blocks in shared memory at once
MAX_REGISTERS = {'multiply': 240, 'load': 24}  # registers of a thread: (2 * 240 + 24) * 128 <= 65536


@dataclasses.dataclass(frozen=True)
class StreamedInput:
    """Ring buffer of one inner array: one warpgroup fills its slots, the other two release them."""

    source: jax.Array
    buffer: jax.Array
    full_barrier: jax.Array
    empty_barrier: jax.Array

    def load(self, n, count, index) -> None:
        """Load block n of `count`; for n >= count only wait until a slot is released."""
        slot = lax.rem(n, jnp.int32(NUM_STAGES))
        pl.when(n >= NUM_STAGES)(lambda: plgpu.barrier_wait(self.empty_barrier.at[slot]))

        @pl.when(n < count)
        def _():
            plgpu.copy_gmem_to_smem(self.source.at[index], self.buffer.at[slot], self.full_barrier.at[slot])

    def wait(self, slot):
        plgpu.barrier_wait(self.full_barrier.at[slot])
        return self.buffer.at[slot]

    def release(self, slot) -> None:
        plgpu.barrier_arrive(self.empty_barrier.at[slot])

    def take_row(self, slot):
        """Load the row of a slot into registers and release the slot; call this once for each block."""
        row = load_row(self.wait(slot), 1)
        self.release(slot)
        return row


@dataclasses.dataclass(frozen=True)
class BlockPair:
    """A block of scores: a warpgroup's part of an outer block and a whole inner block."""

    warpgroup: 'Warpgroup'
    inner_start: jax.Array
    is_masked: bool

    @property
    def shape(self) -> tuple[int, int]:
        return WARPGROUP_ROWS, self.warpgroup.call.inner_block

    def load_rows(self, ref, is_outer: bool):
        """Load the numbers of the outer or inner rows, broadcast to each score."""
        axis = 0 if is_outer else 1
        start, size = (self.warpgroup.outer_start, WARPGROUP_ROWS) if is_outer else (self.inner_start, self.shape[1])
        row = load_row(ref.at[pl.ds(start, size)], axis)
        return broadcast_to_block(row, self.shape, axis)

    def compute_indices(self, is_outer: bool):
        start = self.warpgroup.outer_start if is_outer else self.inner_start
        return start + plgpu.broadcasted_iota(jnp.int32, self.shape, 1 - is_outer, layout=plgpu.Layout.WGMMA)

    def load_query_row(self, row: int):
        ref = self.warpgroup.row_BRT
        return self.load_rows(ref.at[self.warpgroup.get_batch_index(ref), row], not self.warpgroup.call.key_major)

    def apply_mask(self, array, fill_value: float):
        if not self.is_masked:
            return array
        key = self.compute_indices(self.warpgroup.call.key_major)
        array = jnp.where((self.load_query_row(0) <= key) & (key < self.load_query_row(1)), array, fill_value)
        return lax.optimization_barrier(array)  # otherwise LLVM selects in 16 bits, which needs more instructions

    def load_positions(self):
        """Load the positions of the query and the key of each score; call this early to hide the latency."""
        call, ref = self.warpgroup.call, self.warpgroup.position_BS
        if call.bias_function is None:
            return None
        if not call.has_positions:
            return self.compute_indices(not call.key_major), self.compute_indices(call.key_major)
        return self.load_query_row(2), self.load_rows(ref.at[self.warpgroup.get_batch_index(ref)], call.key_major)

    def compute_bias(self, positions):
        if positions is None:
            return None
        bias_function = make_lowerable(self.warpgroup.call.bias_function)
        return bias_function(self.warpgroup.load_parameters(), compute_distance(*positions))

    def compute_bias_slopes(self, positions) -> list[jax.Array]:
        """Return d bias / d parameter for each learned parameter."""
        parameters = self.warpgroup.load_parameters()[: self.warpgroup.call.num_slopes]
        bias_function = self.warpgroup.call.bias_function

        def slope(p, x, distance):
            return value_and_derivative(
                lambda x: bias_function([*parameters[:p], x, *parameters[p + 1 :]], distance), x
            )[1]

        return [
            make_lowerable(functools.partial(slope, p))(parameter, compute_distance(*positions))
            for p, parameter in enumerate(parameters)
        ]


def compute_distance(query, key):
    return jnp.maximum(query - key, 0).astype(jnp.float32)


def load_row(row_ref, axis: int):
    """Load a column of a block for axis 0, a row for axis 1."""
    index = (...,) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(row_ref, *index, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """A multiplying warpgroup: its rows of the outer arrays, the inner arrays, and its output buffers."""

    call: 'KernelCall'
    sequence: jax.Array
    head: jax.Array
    number: jax.Array
    outer_start: jax.Array
    bounds: Sequence[jax.Array]
    small_inputs: Sequence[jax.Array]
    outer: Sequence[jax.Array]
    inner: Sequence[StreamedInput]
    outputs: Sequence[tuple[jax.Array, jax.Array]]  # (buffer, result)
    pingpong_barrier: jax.Array | None

    row_BRT = property(lambda self: self.small_inputs[1])
    position_BS = property(lambda self: self.small_inputs[2])

    def get_batch_index(self, ref):
        return self.sequence if ref.shape[0] > 1 else 0

    def load_statistics(self) -> list[jax.Array]:
        """Load the statistics of the queries of this warpgroup."""
        row_slice = pl.ds(self.outer_start, WARPGROUP_ROWS)
        return [load_row(ref.at[self.sequence, self.head, row_slice], 0) for ref in self.small_inputs[4:]]

    def load_parameters(self) -> list[jax.Array]:
        return [self.small_inputs[3][self.head, p] for p in range(self.call.num_parameters)]

    def pingpong(self, work: Callable = lambda: None):
        """Alternate with the other warpgroup: one uses the tensor cores while the other weighs.

        `work` runs before this warpgroup waits for the other. Without a `pingpong_barrier` only `work` runs.
        """
        if self.pingpong_barrier is not None:
            plgpu.barrier_arrive(self.pingpong_barrier)
        result = work()
        if self.pingpong_barrier is not None:
            plgpu.barrier_wait(self.pingpong_barrier)
        return result

    def loop_over_blocks(self, step: Callable, carry):
        """Return the carry after calling step(pair, slot, carry) for every inner block."""

        def visit(masked, n, carry):
            slot = lax.rem(n - self.bounds[0], jnp.int32(NUM_STAGES))
            return step(BlockPair(self, n * self.call.inner_block, masked), slot, carry)

        pl.when(self.number == 1)(self.pingpong)
        for first, last, masked in self.call.inner_block_ranges:
            carry = lax.fori_loop(self.bounds[first], self.bounds[last], functools.partial(visit, masked), carry)
        pl.when(self.number == 0)(self.pingpong)
        return carry

    def write_outputs(self, arrays, rows) -> None:
        for array, (buffer, _) in zip((*arrays, *rows), self.outputs, strict=True):
            buffer[...] = array.astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, result in self.outputs:
            plgpu.copy_smem_to_gmem(buffer, result)
        plgpu.wait_smem_to_gmem(0)


class KernelCall:
    """Call of a GPU kernel, with the grid (sequence, head, outer block)."""

    def __init__(self, direction: str, block_ops, kernel_spec: KernelSpec, query_BHTK, key_BGSK):
        mask, positions, parameter_HP = kernel_spec.mask, kernel_spec.positions, kernel_spec.parameter_HP
        self.key_major = direction == 'key'
        self.inner_block = choose_inner_block(direction, block_ops.is_register_bound, query_BHTK.shape[-1])
        block_size = (self.inner_block, OUTER_BLOCK) if self.key_major else (OUTER_BLOCK, self.inner_block)
        bound_BI4, self.inner_block_ranges = plan_inner_block_ranges(
            mask, key_BGSK.shape[2], block_size, self.key_major
        )
        self.grid = (*query_BHTK.shape[:2], bound_BI4.shape[1])
        self.bias_function = kernel_spec.score_spec.bias_function
        self.has_positions = positions is not None
        self.num_parameters = 0 if self.bias_function is None else parameter_HP.shape[1]
        self.num_slopes = self.num_parameters if kernel_spec.score_spec.is_learned else 0
        rows = [mask.start_BT, mask.end_BT, *([] if positions is None else positions[:1])]
        batch = max(len(row) for row in rows)
        row_BRT = jnp.stack([jnp.broadcast_to(jnp.asarray(row, jnp.int32), (batch, row.shape[1])) for row in rows], 1)
        position_BS = (
            jnp.zeros((1, OUTER_BLOCK), jnp.int32) if positions is None else jnp.asarray(positions[1], jnp.int32)
        )
        parameter_HP = parameter_HP.astype(jnp.float32) if self.num_parameters else jnp.zeros((self.grid[1], 1))
        self.small_inputs = [jnp.asarray(bound_BI4), row_BRT, position_BS, parameter_HP]

    def __call__(
        self,
        body,
        name: str,
        outer,
        inner,
        output_dtypes,
        num_row_outputs: int = 0,
        statistics=(),
        uses_pingpong: bool = False,
    ):
        """Return outputs with the shape of `outer` and `output_dtypes`, then `num_row_outputs` float32 rows."""
        shape = (*self.grid[:2], *outer[0].shape[2:])
        output_types = [jax.ShapeDtypeStruct(shape, dtype) for dtype in output_dtypes]
        small_inputs = [*self.small_inputs, *statistics]
        ref_counts = len(small_inputs), len(outer), len(inner), len(output_dtypes) + num_row_outputs
        return plgpu.kernel(
            functools.partial(self.run_kernel, body, ref_counts, uses_pingpong),
            out_type=[*output_types, *[jax.ShapeDtypeStruct(shape[:3], jnp.float32)] * num_row_outputs],
            scratch_types=self.make_scratch(outer, inner, num_row_outputs),
            grid=self.grid,
            grid_names=('sequence', 'head', 'outer'),
            num_threads=3,
            thread_name='warpgroup',
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*small_inputs, *outer, *inner)

    def make_scratch(self, outer, inner, num_row_outputs: int) -> tuple:
        def buffer(array, *shape):
            if array.ndim == 3:
                return plgpu.SMEM(shape, array.dtype)
            width = array.shape[-1]
            swizzle = 128 if width % 64 == 0 else 64
            tiles = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
            return plgpu.SMEM((*shape, width), array.dtype, transforms=tiles)

        return (
            tuple(buffer(array, 2, WARPGROUP_ROWS) for array in outer),
            tuple(buffer(array, NUM_STAGES, self.inner_block) for array in inner),
            tuple(plgpu.SMEM((2, WARPGROUP_ROWS), jnp.float32) for _ in range(num_row_outputs)),
            tuple(plgpu.Barrier(num_barriers=2) for _ in outer),
            tuple(plgpu.Barrier(num_barriers=NUM_STAGES) for _ in inner),
            tuple(plgpu.Barrier(num_arrivals=2, num_barriers=NUM_STAGES) for _ in inner),
            plgpu.Barrier(num_arrivals=2),
        )

    def run_kernel(self, body, ref_counts: tuple[int, ...], uses_pingpong: bool, *refs) -> None:
        small_refs, outer, inner, output_refs, scratch = split_refs(refs, ref_counts)
        outer_buffers, inner_buffers, row_buffers, outer_full, inner_full, inner_empty, turn = scratch
        b, h, i, number = (lax.axis_index(name) for name in ('sequence', 'head', 'outer', 'warpgroup'))
        i = i if self.key_major else self.grid[2] - 1 - i  # the longest rows of a causal mask first
        bounds = [small_refs[0][b if small_refs[0].shape[0] > 1 else 0, i, n] for n in range(4)]
        streams = [
            StreamedInput(*stream_refs)
            for stream_refs in zip(inner, inner_buffers, inner_full, inner_empty, strict=True)
        ]

        def index_block(ref, start, size):
            return b, lax.div(h, jnp.int32(self.grid[1] // ref.shape[1])), pl.ds(start, size)

        @pl.when(number == 2)
        def _load():
            plgpu.set_max_registers(MAX_REGISTERS['load'], action='decrease')

            @pl.loop(0, bounds[3] - bounds[0] + NUM_STAGES)
            def _(n):
                for stream in streams:
                    start = (bounds[0] + n) * self.inner_block
                    stream.load(n, bounds[3] - bounds[0], index_block(stream.source, start, self.inner_block))

        @pl.when(number < 2)
        def _multiply():
            plgpu.set_max_registers(MAX_REGISTERS['multiply'], action='increase')
            start = i * OUTER_BLOCK + number * WARPGROUP_ROWS
            warpgroup_buffers = [buffer.at[number] for buffer in outer_buffers]
            for ref, buffer, full in zip(outer, warpgroup_buffers, outer_full, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[index_block(ref, start, WARPGROUP_ROWS)], buffer, full.at[number])
            for full in outer_full:
                plgpu.barrier_wait(full.at[number])
            staged = [
                *warpgroup_buffers[: len(output_refs) - len(row_buffers)],
                *(buffer.at[number] for buffer in row_buffers),
            ]
            results = [
                (buffer, ref.at[index_block(ref, start, WARPGROUP_ROWS)])
                for buffer, ref in zip(staged, output_refs, strict=True)
            ]
            body(
                Warpgroup(
                    self,
                    b,
                    h,
                    number,
                    start,
                    bounds,
                    small_refs,
                    warpgroup_buffers,
                    streams,
                    results,
                    turn if uses_pingpong else None,
                )
            )


def split_refs(refs, counts: tuple[int, ...]) -> list:
    """Split refs into lists of the given lengths, and a list of the rest."""
    parts = []
    rest = list(refs)
    for count in counts:
        parts.append(rest[:count])
        rest = rest[count:]
    return [*parts, rest]


def get_padding_multiple(length: int) -> int:
    return OUTER_BLOCK


def explain_unsupported(reduction: Reduction, score_spec: ScoreSpec, problem: AttentionProblem) -> str | None:
    """Return what these kernels cannot compute, or None."""
    widths = sorted(INNER_BLOCKS['forward'])
    if problem.dtype not in ('bfloat16', 'float16'):
        return f'{problem.dtype} arrays: it needs bfloat16 or float16'
    if problem.width not in widths or problem.value_width != problem.width:
        return f'heads of {problem.width} with values of {problem.value_width}; both must be one of {widths}'
    unsupported_ops = sorted(
        find_unsupported_ops(score_spec.bias_function, make_block_ops(reduction, score_spec).weigh_functions)
    )
    return f'{", ".join(unsupported_ops)}: a kernel cannot compute it' if unsupported_ops else None


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
        uses_pingpong=True,
    )
    return output_BHTV, tuple(statistics)


def backward(
    reduction: Reduction, kernel_spec: KernelSpec, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT
):
    """Compute (d_query, d_key, d_value, d_parameter_HP)."""
    block_ops = make_block_ops(reduction, kernel_spec.score_spec)
    parameter_HP = kernel_spec.parameter_HP
    statistics = block_ops.scale_rows([row.astype(jnp.float32) for row in rows_BHT])
    query_arrays, key_arrays = [query_BHTK, d_output_BHTV], [key_BGSK, value_BGSV]
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
        product_QS = multiply(query, keys.wait(slot).transpose((1, 0)), warpgroup.pingpong)
        keys.release(slot)
        weight_QS, rescale, rows = block_ops.add(product_QS, rows, pair.compute_bias(positions), pair.apply_mask)
        if rescale is not None:
            total_QV *= broadcast_to_block(rescale, total_QV.shape, 0)
        weight_QS = weight_QS.astype(values.buffer.dtype)
        total_QV, rows, weight_QS = lax.optimization_barrier((total_QV, rows, weight_QS))
        total_QV = accumulate((total_QV,), (weight_QS, warpgroup.pingpong(lambda: values.wait(slot))))[0]
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
        positions = pair.load_positions()

        def load_statistic(n):
            return broadcast_to_block(statistics[n], pair.shape, 0)

        product_QS = multiply(query, keys.wait(slot).transpose((1, 0)))
        _, differentiate = block_ops.compute_weight_and_vjp(
            product_QS, pair.compute_bias(positions), load_statistic, pair.apply_mask
        )
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
        positions = pair.load_positions()

        def load_statistic(n):
            return broadcast_to_block(statistics[n].take_row(slot), pair.shape, 1)

        query = queries.wait(slot)
        product_SQ = multiply(key, query.transpose((1, 0)))
        weight_SQ, differentiate = block_ops.compute_weight_and_vjp(
            product_SQ, pair.compute_bias(positions), load_statistic, pair.apply_mask
        )
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
