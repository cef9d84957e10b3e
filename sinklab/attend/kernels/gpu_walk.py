"""The walk of a GPU kernel: of a thread block's three warpgroups two multiply, each its half of the outer block.

The third loads the inner blocks, which all of them pass in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sinklab.attend.kernels.gpu_block import across
from sinklab.attend.kernels.gpu_lowering import lowerable, slopes
from sinklab.attend.kernels.gpu_plan import OUTER, inner, plan
from sinklab.attend.kernels.primitive import Problem

ROWS = OUTER // 2  # of the outer block for one warpgroup: what wgmma multiplies at once
STAGES = 2  # inner blocks on the chip
REGISTERS = {'multiply': 240, 'load': 24}  # of a thread: (2 * 240 + 24) * 128 <= 65536


@dataclasses.dataclass(frozen=True)
class Stream:
    """Where one inner array passes through: buffers that one warpgroup fills and the others free."""

    source: jax.Array
    buffer: jax.Array
    full: jax.Array
    empty: jax.Array

    def load(self, n, count, place) -> None:
        """Block n of `count`; at the end this waits until all are freed."""
        slot = lax.rem(n, jnp.int32(STAGES))
        pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(self.empty.at[slot]))

        @pl.when(n < count)
        def _():
            plgpu.copy_gmem_to_smem(self.source.at[place], self.buffer.at[slot], self.full.at[slot])

    def wait(self, slot):
        plgpu.barrier_wait(self.full.at[slot])
        return self.buffer.at[slot]

    def free(self, slot) -> None:
        plgpu.barrier_arrive(self.empty.at[slot])

    def take(self, slot):
        """A row, in registers: once for every block."""
        row = in_registers(self.wait(slot), 1)
        self.free(slot)
        return row


@dataclasses.dataclass(frozen=True)
class Pair:
    """A block of scores: a warpgroup's part of an outer block and a whole inner block."""

    team: 'Team'
    inner_at: jax.Array
    masked: bool

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.team.call.inner

    def of_each(self, ref, outer: bool):
        """Numbers of the outer rows, or of the inner ones, for each score."""
        axis = 0 if outer else 1
        at, size = (self.team.outer_at, ROWS) if outer else (self.inner_at, self.shape[1])
        row = in_registers(ref.at[pl.ds(at, size)], axis)
        return across(row, self.shape, axis)

    def place(self, outer: bool):
        at = self.team.outer_at if outer else self.inner_at
        return at + plgpu.broadcasted_iota(jnp.int32, self.shape, 1 - outer, layout=plgpu.Layout.WGMMA)

    def of_query(self, row: int):
        ref = self.team.row_BRT
        return self.of_each(ref.at[self.team.sequence_of(ref), row], not self.team.call.by_key)

    def hide(self, array, instead: float):
        if not self.masked:
            return array
        key = self.place(self.team.call.by_key)
        return jnp.where((self.of_query(0) <= key) & (key < self.of_query(1)), array, instead)

    def places(self):
        """Positions of the query and the key of each score; loaded early, so that nobody waits for them."""
        call, ref = self.team.call, self.team.position_BS
        if call.curve is None:
            return None
        if not call.positions:
            return self.place(not call.by_key), self.place(call.by_key)
        return self.of_query(2), self.of_each(ref.at[self.team.sequence_of(ref)], call.by_key)

    def bias(self, places):
        return None if places is None else lowerable(self.team.call.curve)(self.team.parameters(), distance(*places))

    def slopes(self, places) -> list[jax.Array]:
        """d curve / d parameter, for each that is learned."""
        given, curve = self.team.parameters()[: self.team.call.slopes], self.team.call.curve

        def slope(p, x, distance):
            return slopes(lambda x: curve([*given[:p], x, *given[p + 1 :]], distance), x)[1]

        return [lowerable(functools.partial(slope, p))(one, distance(*places)) for p, one in enumerate(given)]


def distance(query, key):
    return jnp.maximum(query - key, 0).astype(jnp.float32)


def in_registers(row_ref, axis: int):
    """A column of a block for axis 0, a row for axis 1."""
    index = (...,) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(row_ref, *index, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


@dataclasses.dataclass(frozen=True)
class Team:
    """A multiplying warpgroup: its rows of the outer arrays, the inner ones, and its places in the results."""

    call: 'Call'
    sequence: jax.Array
    head: jax.Array
    number: jax.Array
    outer_at: jax.Array
    bound: Sequence[jax.Array]
    small: Sequence[jax.Array]
    outer: Sequence[jax.Array]
    inner: Sequence[Stream]
    made: Sequence[tuple[jax.Array, jax.Array]]  # (buffer, result)
    turn: jax.Array | None

    row_BRT = property(lambda self: self.small[1])
    position_BS = property(lambda self: self.small[2])

    def sequence_of(self, ref):
        return self.sequence if ref.shape[0] > 1 else 0

    def statistics(self) -> list[jax.Array]:
        """Those of its own queries."""
        at = pl.ds(self.outer_at, ROWS)
        return [in_registers(ref.at[self.sequence, self.head, at], 0) for ref in self.small[4:]]

    def parameters(self) -> list[jax.Array]:
        return [self.small[3][self.head, p] for p in range(self.call.parameters)]

    def meet(self, work: Callable = lambda: None):
        """Where the two take turns, one has the tensor cores while the other weighs; `work` is done in between."""
        if self.turn is not None:
            plgpu.barrier_arrive(self.turn)
        found = work()
        if self.turn is not None:
            plgpu.barrier_wait(self.turn)
        return found

    def walk(self, step: Callable, carry):
        """carry after step(pair, slot, carry) for every inner block."""

        def visit(masked, n, carry):
            slot = lax.rem(n - self.bound[0], jnp.int32(STAGES))
            return step(Pair(self, n * self.call.inner, masked), slot, carry)

        pl.when(self.number == 1)(self.meet)
        for first, last, masked in self.call.segments:
            carry = lax.fori_loop(self.bound[first], self.bound[last], functools.partial(visit, masked), carry)
        pl.when(self.number == 0)(self.meet)
        return carry

    def write(self, arrays, rows) -> None:
        for array, (buffer, _) in zip((*arrays, *rows), self.made, strict=True):
            buffer[...] = array.astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, result in self.made:
            plgpu.copy_smem_to_gmem(buffer, result)
        plgpu.wait_smem_to_gmem(0)


class Call:
    """A kernel over (sequence, head, outer block)."""

    def __init__(self, direction: str, block, problem: Problem, query_BHTK, key_BGSK):
        mask, positions, parameter_HP = problem.mask, problem.positions, problem.parameter_HP
        self.by_key = direction == 'key'
        self.inner = inner(direction, block.crowded, query_BHTK.shape[-1])
        size = (self.inner, OUTER) if self.by_key else (OUTER, self.inner)
        bound_BI4, self.segments = plan(mask, key_BGSK.shape[2], size, self.by_key)
        self.grid = (*query_BHTK.shape[:2], bound_BI4.shape[1])
        self.curve, self.positions = problem.scores.curve, positions is not None
        self.parameters = 0 if self.curve is None else parameter_HP.shape[1]
        self.slopes = self.parameters if problem.scores.learned else 0
        rows = [mask.start_BT, mask.end_BT, *([] if positions is None else positions[:1])]
        many = max(len(row) for row in rows)
        row_BRT = jnp.stack([jnp.broadcast_to(jnp.asarray(row, jnp.int32), (many, row.shape[1])) for row in rows], 1)
        position_BS = jnp.zeros((1, OUTER), jnp.int32) if positions is None else jnp.asarray(positions[1], jnp.int32)
        parameter_HP = parameter_HP.astype(jnp.float32) if self.parameters else jnp.zeros((self.grid[1], 1))
        self.small = [jnp.asarray(bound_BI4), row_BRT, position_BS, parameter_HP]

    def __call__(self, body, name: str, outer, inner, made, rows: int = 0, statistics=(), turns: bool = False):
        """Results of the shape of `outer`, of the dtypes `made`, and `rows` more in float32 with one row each."""
        shape = (*self.grid[:2], *outer[0].shape[2:])
        types = [jax.ShapeDtypeStruct(shape, dtype) for dtype in made]
        small = [*self.small, *statistics]
        counts = len(small), len(outer), len(inner), len(made) + rows
        return plgpu.kernel(
            functools.partial(self.kernel, body, counts, turns),
            out_type=[*types, *[jax.ShapeDtypeStruct(shape[:3], jnp.float32)] * rows],
            scratch_types=self.scratch(outer, inner, rows),
            grid=self.grid,
            grid_names=('sequence', 'head', 'outer'),
            num_threads=3,
            thread_name='warpgroup',
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*small, *outer, *inner)

    def scratch(self, outer, inner, rows: int) -> tuple:
        def buffer(array, *shape):
            if array.ndim == 3:
                return plgpu.SMEM(shape, array.dtype)
            width = array.shape[-1]
            swizzle = 128 if width % 64 == 0 else 64
            tiles = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
            return plgpu.SMEM((*shape, width), array.dtype, transforms=tiles)

        return (
            tuple(buffer(array, 2, ROWS) for array in outer),
            tuple(buffer(array, STAGES, self.inner) for array in inner),
            tuple(plgpu.SMEM((2, ROWS), jnp.float32) for _ in range(rows)),
            tuple(plgpu.Barrier(num_barriers=2) for _ in outer),
            tuple(plgpu.Barrier(num_barriers=STAGES) for _ in inner),
            tuple(plgpu.Barrier(num_arrivals=2, num_barriers=STAGES) for _ in inner),
            plgpu.Barrier(num_arrivals=2),
        )

    def kernel(self, body, counts: tuple[int, ...], turns: bool, *refs) -> None:
        small, outer, inner, made, scratch = split(refs, counts)
        outer_buffers, inner_buffers, row_buffers, outer_full, inner_full, inner_empty, turn = scratch
        b, h, i, number = (lax.axis_index(name) for name in ('sequence', 'head', 'outer', 'warpgroup'))
        i = i if self.by_key else self.grid[2] - 1 - i  # under a causal mask the longest first
        bound = [small[0][b if small[0].shape[0] > 1 else 0, i, n] for n in range(4)]
        streams = [Stream(*one) for one in zip(inner, inner_buffers, inner_full, inner_empty, strict=True)]

        def place(ref, at, size):
            return b, lax.div(h, jnp.int32(self.grid[1] // ref.shape[1])), pl.ds(at, size)

        @pl.when(number == 2)
        def _load():
            plgpu.set_max_registers(REGISTERS['load'], action='decrease')

            @pl.loop(0, bound[3] - bound[0] + STAGES)
            def _(n):
                for stream in streams:
                    at = (bound[0] + n) * self.inner
                    stream.load(n, bound[3] - bound[0], place(stream.source, at, self.inner))

        @pl.when(number < 2)
        def _multiply():
            plgpu.set_max_registers(REGISTERS['multiply'], action='increase')
            at = i * OUTER + number * ROWS
            own = [buffer.at[number] for buffer in outer_buffers]
            for ref, buffer, full in zip(outer, own, outer_full, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[place(ref, at, ROWS)], buffer, full.at[number])
            for full in outer_full:
                plgpu.barrier_wait(full.at[number])
            staged = [*own[: len(made) - len(row_buffers)], *(buffer.at[number] for buffer in row_buffers)]
            results = [(buffer, ref.at[place(ref, at, ROWS)]) for buffer, ref in zip(staged, made, strict=True)]
            body(Team(self, b, h, number, at, bound, small, own, streams, results, turn if turns else None))


def split(refs, counts: tuple[int, ...]) -> list:
    """As many as each count says, and the rest."""
    parts, rest = [], list(refs)
    for count in counts:
        parts.append(rest[:count])
        rest = rest[count:]
    return [*parts, rest]
