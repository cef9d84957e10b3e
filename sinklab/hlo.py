"""What a compiled program says of itself, read from its text: what travels between devices, and how often."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

COMPUTATION = re.compile(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$')
INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::T\((\d+),(\d+)\))?)?')
CALLED = re.compile(r'(?:calls|body|condition)=%?([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}')
# Bytes that each of n devices sends, over those of the largest array of the collective.
SENT = {
    'all-gather': lambda n: (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1.0,  # of pairs
}
SCATTERING = 'all-reduce-scatter'  # in the name of what keeps a part of an all-reduce as it is made
# Of a collective that is fused with what is computed meanwhile: one instruction begins it, others go on with it.
BEGUN, CONTINUED = 'async-collective-start', ('async-collective-done', 'async_collective_fusion')


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.rest)
        return found[1] if found else None

    @property
    def called(self) -> list[str]:
        found = [name for names in CALLED.findall(self.rest) for name in ','.join(names).split(',')]
        if self.opcode == 'call':
            found.append(self.attribute(r'to_apply=%?([\w.\-]+)') or '')
        return [name.strip(' %') for name in found if name]

    @property
    def origin(self) -> str:
        """Where in the program that was traced it comes from."""
        return self.attribute(r'op_name="([^"]*)"') or ''


NOBODY = Instruction('', '', '', '')  # calls the entry


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # of SENT
    types: tuple[str, ...]  # of what it gives, or reads where that is more
    bytes: int  # of those
    groups: tuple[tuple[int, ...], ...]  # of devices, by their numbers
    times: int  # a run of the program
    asynchronous: bool
    origin: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends a run of the program."""
        return self.times * self.bytes * SENT[self.kind](len(self.groups[0]))


class Program:
    """The computations of a module, and how often each is run."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        found = re.search(r'num_partitions=(\d+)', text.partition('\n\n')[0])
        self.devices = int(found[1]) if found else 1
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := COMPUTATION.match(line):
                current = self.computations.setdefault(header[1], [])
                if line.startswith('ENTRY'):
                    self.entry = header[1]
            elif found := INSTRUCTION.match(line):
                current.append(Instruction(*found.groups()))

    @functools.cached_property
    def times(self) -> dict[str, int]:
        """How often a computation is run; those of a fusion count as what calls them."""
        times: dict[str, int] = collections.Counter({self.entry: 1})
        for name in self.ordered():
            for one in self.computations[name]:
                trips = self.trips(one) if one.opcode == 'while' else 1
                for called in one.called:
                    times[called] += times[name] * trips
        return times

    def ordered(self) -> list[str]:
        """Callers before what they call."""
        done: dict[str, None] = {}

        def visit(name: str) -> None:
            if name in done or name not in self.computations:
                return
            for one in self.computations[name]:
                for called in one.called:
                    visit(called)
            done[name] = None

        visit(self.entry)
        return [*reversed(done)]

    def trips(self, loop: Instruction) -> int:
        """Of a loop that counts from 0, as those of lax.scan do: the number that its condition compares with."""
        if known := loop.attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations.get(loop.attribute(r'condition=%?([\w.\-]+)') or '', [])
        constants = (one.rest for one in condition if one.opcode == 'constant' and one.type.startswith('s32[]'))
        return max((int(text.partition(')')[0]) for text in constants), default=1)

    def run(self) -> Iterator[tuple[Instruction, int]]:
        """(instruction, how often it is run), those inside fusions left out."""
        inner = {name for one in self.instructions() if one.opcode == 'fusion' for name in one.called}
        for name in self.ordered():
            if name not in inner:
                yield from ((one, self.times[name]) for one in self.computations[name])

    def instructions(self) -> Iterator[Instruction]:
        for found in self.computations.values():
            yield from found

    def cycles(self) -> float:
        """What the compiler for TPUs estimates of a run; of kernels it says nothing."""
        return sum(times * int(one.attribute(r'"estimated_cycles":"(\d+)"') or 0) for one, times in self.run())

    def kernels(self, prefix: str) -> dict[str, int]:
        """How often kernels are run whose name begins so, by the rest of that."""
        found: dict[str, int] = collections.Counter()
        for one, times in self.run():
            if one.opcode == 'custom-call' and one.name.startswith(prefix):
                found[one.name.removeprefix(prefix).partition('.')[0]] += times
        return found

    def collectives(self) -> list[Collective]:
        found, callers = [], self.callers
        for name in self.ordered():
            caller = callers.get(name, NOBODY)
            if name.startswith(CONTINUED) or caller.name.startswith(CONTINUED):
                continue
            for one in self.computations[name]:
                kind = one.opcode.removesuffix('-start')
                if kind in SENT:
                    beside = one.opcode.endswith('-start') or caller.name.startswith(BEGUN)
                    beside |= caller.opcode == 'async-start'
                    found.append(self.collective(one, kind, name, beside))
                elif one.opcode == 'send' and (between := one.attribute(r'_xla_megascale_transfer_type="(\w+)"')):
                    found.append(self.between(one, between.lower().replace('_', '-'), name))
        return found

    def between(self, one: Instruction, kind: str, within: str) -> Collective:
        """What a device exchanges with those in its place in other slices, which the host sends meanwhile."""
        dtype, shape, *_ = ARRAY.findall(one.type)[0]
        slices, last = re.search(r'_xla_megascale_target="\{([\d,]+)\}x\{0:(\d+)\}"', one.rest).groups()
        group = tuple(index * (int(last) + 1) for index in range(slices.count(',') + 1))
        return Collective(
            kind, (f'{dtype}[{shape}]',), size_of(dtype, shape), (group,), self.times[within], True, one.origin
        )

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """By a computation, what calls it, or one of those."""
        return {called: one for one in self.instructions() for called in one.called}

    def collective(self, one: Instruction, kind: str, within: str, asynchronous: bool) -> Collective:
        arrays = given(one.opcode, ARRAY.findall(one.type))
        groups = groups_of(one.rest, self.devices)
        bytes = sum(size_of(dtype, shape) for dtype, shape, *_ in arrays)
        if kind == 'all-reduce' and SCATTERING in within:
            kind = 'reduce-scatter'
        elif kind == 'reduce-scatter':
            bytes *= len(groups[0])
        return Collective(
            kind,
            tuple(f'{dtype}[{shape}]' for dtype, shape, *_ in arrays),
            bytes,
            groups,
            self.times[within],
            asynchronous,
            one.origin,
        )

    def buffers(self, most: int = 10) -> list[tuple[int, str, str]]:
        """(bytes, type, origin) of the largest arrays that are made, as they lie in memory."""
        sizes: dict[tuple[str, str], int] = {}
        for one, _ in self.run():
            if one.opcode not in ('parameter', 'get-tuple-element', 'tuple', 'while', 'bitcast'):
                for array in ARRAY.finditer(one.type):
                    sizes[array[0].split('{')[0], one.origin] = padded(*array.groups())
        return sorted(((size, *key) for key, size in sizes.items()), reverse=True)[:most]


def given(opcode: str, arrays: list) -> list:
    """Of the arrays in an instruction's type, those that a collective gives."""
    if opcode in ('all-gather-start', 'reduce-scatter-start'):
        return arrays[len(arrays) // 2 :]  # operands come first
    if opcode == 'collective-permute-start':
        return arrays[1:2]  # between an operand and what the runtime keeps
    return arrays


def size_of(dtype: str, shape: str) -> int:
    bits = {'pred': 8, 'token': 0}.get(dtype) or int(re.search(r'\d+', dtype)[0] if re.search(r'\d', dtype) else 0)
    return math.prod(int(size) for size in shape.split(',') if size) * bits // 8


def padded(dtype: str, shape: str, order: str | None, rows: str | None, lanes: str | None) -> int:
    """Bytes in memory, where the last two dimensions fill tiles."""
    sizes = [int(size) for size in shape.split(',') if size]
    if rows and order and len(sizes) > 1:
        for at, tile in zip(map(int, order.split(',')), (int(lanes), int(rows)), strict=False):
            sizes[at] = -(-sizes[at] // tile) * tile
    return size_of(dtype, ','.join(map(str, sizes)))


def groups_of(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The replica groups, in each of the notations that there are for them; none are one of all devices."""
    if 'replica_groups={}' in rest:
        return (tuple(range(devices)),)
    if plain := re.search(r'replica_groups=\{(\{[\d,{}]*\})\}', rest):
        return tuple(tuple(map(int, group.split(','))) for group in re.findall(r'\{([\d,]+)\}', plain[1]))
    if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
        shape = tuple(map(int, iota[3].split(',')))
        order = tuple(map(int, iota[4].split(','))) if iota[4] else range(len(shape))
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose(tuple(order))
        return tuple(map(tuple, numbers.reshape(int(iota[1]), int(iota[2])).tolist()))
    if named := re.search(r'replica_groups=mesh\[([^\]]*)\](?: ?\{([^}]*)\})?', rest):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        over = re.findall(r"'([^']+)'", named[2] or '')
        numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        others = [at for at, name in enumerate(sizes) if name not in over]
        moved = numbers.transpose((*others, *(at for at, name in enumerate(sizes) if name in over)))
        return tuple(map(tuple, moved.reshape(-1, math.prod(sizes[name] for name in over)).tolist()))
    if pairs := re.search(r'source_target_pairs=\{(\{[\d,{}]*\})\}', rest):
        return tuple(tuple(map(int, pair.split(','))) for pair in re.findall(r'\{([\d,]+)\}', pairs[1]))
    raise ValueError(f'the devices of a collective are written in an unknown way: {rest[:200]}')
