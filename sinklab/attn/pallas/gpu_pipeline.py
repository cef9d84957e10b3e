"""Pipeline of the GPU kernels: block sizes, order of blocks, warpgroups and their shared memory.

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
from sinklab.attn.pallas.gpu_block import broadcast_to_block
from sinklab.attn.pallas.gpu_lowering import compute_slopes, make_lowerable
from sinklab.attn.pallas.primitive import KernelSpec

OUTER_BLOCK = 128  # queries or keys of a thread block
INNER_BLOCKS = {  # rows of an inner block, by direction and head width; the number of registers limits them
    'forward': {64: 128, 96: 128, 128: 128},
    'query': {64: 128, 96: 128, 128: 128},
    'key': {64: 128, 96: 64, 128: 64},
}


def choose_inner_block(direction: str, is_register_bound: bool, width: int) -> int:
    """Return the rows of an inner block: fewer if a bias or slopes of several masses need registers."""
    return 64 if is_register_bound and direction != 'forward' else INNER_BLOCKS[direction][width]


def plan_segments(mask: Mask, num_keys: int, block_size: tuple[int, int], key_major: bool):
    """Return bound_BI4, and the segments (first bound, last bound, is_masked) of blocks to visit.

    Blocks with visible keys are between bounds 0 and 3 of their outer block; those between 1 and 2 need no mask.
    """
    xp = np if mask.is_static else jnp
    kind_BIJ, *_ = block_plan.classify_blocks(xp, (mask.start_BT, mask.end_BT), num_keys, block_size)
    kind_BIJ = kind_BIJ.swapaxes(1, 2) if key_major else kind_BIJ
    is_visible, is_interior = kind_BIJ != block_plan.HIDDEN, kind_BIJ == block_plan.INTERIOR
    number_J, num_blocks = np.arange(is_visible.shape[2]), is_visible.shape[2]

    def find_first(condition_BIJ):
        return xp.where(condition_BIJ, number_J, num_blocks).min(-1)

    end_BI = xp.where(is_visible, number_J + 1, 0).max(-1)
    begin_BI = xp.minimum(find_first(is_visible), end_BI)
    inside_BI = xp.where(is_interior.any(-1), find_first(is_interior), end_BI if key_major else begin_BI)
    outside_BI = xp.minimum(find_first(~is_interior & (number_J >= inside_BI[..., None])), end_BI)
    bound_BI4 = xp.stack([begin_BI, inside_BI, outside_BI, end_BI], -1)
    segments = [(0, 1, True), (1, 2, False), (2, 3, True)]
    if mask.is_static:
        segments = [
            segment for segment in segments if (bound_BI4[..., segment[0]] < bound_BI4[..., segment[1]]).any()
        ]
    return bound_BI4.astype(xp.int32), segments


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
        return jnp.where((self.load_query_row(0) <= key) & (key < self.load_query_row(1)), array, fill_value)

    def load_positions(self):
        """Load the positions of the query and the key of each score; call this early to hide the latency."""
        call, ref = self.warpgroup.call, self.warpgroup.position_BS
        if call.bias_function is None:
            return None
        if not call.has_positions:
            return self.compute_indices(not call.key_major), self.compute_indices(call.key_major)
        return self.load_query_row(2), self.load_rows(ref.at[self.warpgroup.get_batch_index(ref)], call.key_major)

    def compute_bias(self, positions):
        return (
            None
            if positions is None
            else make_lowerable(self.warpgroup.call.bias_function)(
                self.warpgroup.load_parameters(), compute_distance(*positions)
            )
        )

    def compute_bias_slopes(self, positions) -> list[jax.Array]:
        """Return d bias / d parameter for each learned parameter."""
        parameters, bias_function = (
            self.warpgroup.load_parameters()[: self.warpgroup.call.num_slopes],
            self.warpgroup.call.bias_function,
        )

        def slope(p, x, distance):
            return compute_slopes(lambda x: bias_function([*parameters[:p], x, *parameters[p + 1 :]], distance), x)[1]

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
    turn_barrier: jax.Array | None

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

    def take_turns(self, work: Callable = lambda: None):
        """Alternate with the other warpgroup: one uses the tensor cores while the other weighs.

        `work` runs before this warpgroup waits for the other. Without a `turn_barrier` only `work` runs.
        """
        if self.turn_barrier is not None:
            plgpu.barrier_arrive(self.turn_barrier)
        result = work()
        if self.turn_barrier is not None:
            plgpu.barrier_wait(self.turn_barrier)
        return result

    def loop_over_blocks(self, step: Callable, carry):
        """Return the carry after calling step(pair, slot, carry) for every inner block."""

        def visit(masked, n, carry):
            slot = lax.rem(n - self.bounds[0], jnp.int32(NUM_STAGES))
            return step(BlockPair(self, n * self.call.inner_block, masked), slot, carry)

        pl.when(self.number == 1)(self.take_turns)
        for first, last, masked in self.call.segments:
            carry = lax.fori_loop(self.bounds[first], self.bounds[last], functools.partial(visit, masked), carry)
        pl.when(self.number == 0)(self.take_turns)
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
        bound_BI4, self.segments = plan_segments(mask, key_BGSK.shape[2], block_size, self.key_major)
        self.grid = (*query_BHTK.shape[:2], bound_BI4.shape[1])
        self.bias_function, self.has_positions = kernel_spec.score_spec.bias_function, positions is not None
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
        takes_turns: bool = False,
    ):
        """Return outputs with the shape of `outer` and `output_dtypes`, then `num_row_outputs` float32 rows."""
        shape = (*self.grid[:2], *outer[0].shape[2:])
        output_types = [jax.ShapeDtypeStruct(shape, dtype) for dtype in output_dtypes]
        small_inputs = [*self.small_inputs, *statistics]
        ref_counts = len(small_inputs), len(outer), len(inner), len(output_dtypes) + num_row_outputs
        return plgpu.kernel(
            functools.partial(self.run_kernel, body, ref_counts, takes_turns),
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

    def run_kernel(self, body, ref_counts: tuple[int, ...], takes_turns: bool, *refs) -> None:
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
                    turn if takes_turns else None,
                )
            )


def split_refs(refs, counts: tuple[int, ...]) -> list:
    """Split refs into lists of the given lengths, and a list of the rest."""
    parts, rest = [], list(refs)
    for count in counts:
        parts.append(rest[:count])
        rest = rest[count:]
    return [*parts, rest]
