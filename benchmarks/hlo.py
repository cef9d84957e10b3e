"""Parser of compiled HLO text: collectives, array types, kernels, and execution counts."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import jax
import numpy as np

COMPUTATION_PATTERN = re.compile(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$')
INSTRUCTION_PATTERN = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
ARRAY_PATTERN = re.compile(r'([a-z][a-z0-9]*)\[([\d,]*)\]')
CALLEE_PATTERN = re.compile(
    r'(?:calls|body|condition)=%?([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}'
)
# Bytes that each of n devices sends, divided by the bytes of the largest array of the collective.
SENT_BYTES_RATIO = {
    'all-gather': lambda n: (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1.0,  # between pairs of devices
}
SCATTER_FUSION_NAME = 'all-reduce-scatter'  # in the name of a fusion that keeps a shard of an all-reduce
# Names of a collective that is fused with concurrent computation: one instruction starts it, others continue it.
ASYNC_START_PREFIX, ASYNC_CONTINUATION_PREFIXES = (
    'async-collective-start',
    ('async-collective-done', 'async_collective_fusion'),
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    operands_and_attributes: str

    def find_attribute(self, pattern: str) -> str | None:
        match = re.search(pattern, self.operands_and_attributes)
        return match[1] if match else None

    @property
    def callees(self) -> list[str]:
        callees = [
            name
            for names in CALLEE_PATTERN.findall(self.operands_and_attributes)
            for name in ','.join(names).split(',')
        ]
        if self.opcode == 'call':
            callees.append(self.find_attribute(r'to_apply=%?([\w.\-]+)') or '')
        return [name.strip(' %') for name in callees if name]


NO_CALLER = Instruction('', '', '', '')  # caller of the entry computation


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # key of SENT_BYTES_RATIO
    num_bytes: int  # of its largest array: the results or, for a reduce-scatter, the operand
    replica_groups: tuple[tuple[int, ...], ...]  # groups of device numbers
    num_executions: int  # in one execution of the program
    is_async: bool

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in one execution of the program."""
        return self.num_executions * self.num_bytes * SENT_BYTES_RATIO[self.kind](len(self.replica_groups[0]))


class HloProgram:
    """The computations of a compiled module, and how often each is executed."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        match = re.search(r'num_partitions=(\d+)', text.partition('\n\n')[0])
        self.num_devices = int(match[1]) if match else 1
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := COMPUTATION_PATTERN.match(line):
                current = self.computations.setdefault(header[1], [])
                if line.startswith('ENTRY'):
                    self.entry = header[1]
            elif match := INSTRUCTION_PATTERN.match(line):
                current.append(Instruction(*match.groups()))

    @functools.cached_property
    def execution_counts(self) -> dict[str, int]:
        """Number of executions of each computation; a fusion has that of its caller."""
        counts: dict[str, int] = collections.Counter({self.entry: 1})
        for name in self.sort_computations():
            for instruction in self.computations[name]:
                trips = self.count_trips(instruction) if instruction.opcode == 'while' else 1
                for callee in instruction.callees:
                    counts[callee] += counts[name] * trips
        return counts

    def sort_computations(self) -> list[str]:
        """Sort the computations so that callers come before callees."""
        visited: dict[str, None] = {}

        def visit(name: str) -> None:
            if name in visited or name not in self.computations:
                return
            for instruction in self.computations[name]:
                for callee in instruction.callees:
                    visit(callee)
            visited[name] = None

        visit(self.entry)
        return [*reversed(visited)]

    def count_trips(self, loop: Instruction) -> int:
        """Return the trip count of a loop from 0, as of lax.scan; its condition compares with that constant."""
        if trip_count := loop.find_attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(trip_count)
        condition = self.computations.get(loop.find_attribute(r'condition=%?([\w.\-]+)') or '', [])
        constants = (
            instruction.operands_and_attributes
            for instruction in condition
            if instruction.opcode == 'constant' and instruction.type.startswith('s32[]')
        )
        return max((int(text.partition(')')[0]) for text in constants), default=1)

    def list_executed_instructions(self) -> Iterator[tuple[Instruction, int]]:
        """List (instruction, execution count), without those inside fusions."""
        fused_computations = {
            name
            for instruction in self.list_instructions()
            if instruction.opcode == 'fusion'
            for name in instruction.callees
        }
        for name in self.sort_computations():
            if name not in fused_computations:
                yield from ((instruction, self.execution_counts[name]) for instruction in self.computations[name])

    def list_instructions(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions

    def estimate_cycles(self) -> float:
        """Return the cycles that the TPU compiler estimates; kernels are not included."""
        return sum(
            count * int(instruction.find_attribute(r'"estimated_cycles":"(\d+)"') or 0)
            for instruction, count in self.list_executed_instructions()
        )

    def count_kernels(self, prefix: str) -> dict[str, int]:
        """Count executions of kernels whose name has this prefix, by the rest of the name."""
        counts: dict[str, int] = collections.Counter()
        for instruction, count in self.list_executed_instructions():
            if instruction.opcode == 'custom-call' and instruction.name.startswith(prefix):
                counts[instruction.name.removeprefix(prefix).partition('.')[0]] += count
        return counts

    def find_collectives(self) -> list[Collective]:
        collectives, callers = [], self.callers
        for name in self.sort_computations():
            caller = callers.get(name, NO_CALLER)
            if name.startswith(ASYNC_CONTINUATION_PREFIXES) or caller.name.startswith(ASYNC_CONTINUATION_PREFIXES):
                continue
            for instruction in self.computations[name]:
                kind = instruction.opcode.removesuffix('-start')
                if kind in SENT_BYTES_RATIO:
                    is_async = instruction.opcode.endswith('-start') or caller.name.startswith(ASYNC_START_PREFIX)
                    is_async |= caller.opcode == 'async-start'
                    collectives.append(self.make_collective(instruction, kind, name, is_async))
                elif instruction.opcode == 'send' and (
                    transfer_type := instruction.find_attribute(r'_xla_megascale_transfer_type="(\w+)"')
                ):
                    collectives.append(
                        self.make_megascale_collective(instruction, transfer_type.lower().replace('_', '-'), name)
                    )
        return collectives

    def make_megascale_collective(self, instruction: Instruction, kind: str, computation: str) -> Collective:
        """Make the collective of a transfer between slices, which the host sends in the background."""
        dtype, shape = ARRAY_PATTERN.findall(instruction.type)[0]
        slices, last_device = re.search(
            r'_xla_megascale_target="\{([\d,]+)\}x\{0:(\d+)\}"', instruction.operands_and_attributes
        ).groups()
        group = tuple(index * (int(last_device) + 1) for index in range(slices.count(',') + 1))
        return Collective(
            kind,
            count_bytes(dtype, shape),
            (group,),
            self.execution_counts[computation],
            True,
        )

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that calls each computation; one of them if there are several."""
        return {callee: instruction for instruction in self.list_instructions() for callee in instruction.callees}

    def make_collective(self, instruction: Instruction, kind: str, computation: str, is_async: bool) -> Collective:
        arrays = select_result_arrays(instruction.opcode, ARRAY_PATTERN.findall(instruction.type))
        groups = parse_replica_groups(instruction.operands_and_attributes, self.num_devices)
        num_bytes = sum(count_bytes(dtype, shape) for dtype, shape in arrays)
        if kind == 'all-reduce' and SCATTER_FUSION_NAME in computation:
            kind = 'reduce-scatter'
        elif kind == 'reduce-scatter':
            num_bytes *= len(groups[0])
        return Collective(
            kind,
            num_bytes,
            groups,
            self.execution_counts[computation],
            is_async,
        )


def select_result_arrays(opcode: str, arrays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Select the arrays of an instruction's type that are results of the collective."""
    if opcode in ('all-gather-start', 'reduce-scatter-start'):
        return arrays[len(arrays) // 2 :]  # operands come first
    if opcode == 'collective-permute-start':
        return arrays[1:2]  # after the operand and before values of the runtime
    return arrays


def count_bytes(dtype: str, shape: str) -> int:
    number = re.search(r'\d+', dtype)
    bits = {'pred': 8, 'token': 0}.get(dtype) or int(number[0] if number else 0)
    return math.prod(int(size) for size in shape.split(',') if size) * bits // 8


def parse_replica_groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Parse replica groups in any of their notations; none means one group of all devices."""
    if 'replica_groups={}' in attributes:
        return (tuple(range(num_devices)),)
    if explicit := re.search(r'replica_groups=\{(\{[\d,{}]*\})\}', attributes):
        return tuple(tuple(map(int, group.split(','))) for group in re.findall(r'\{([\d,]+)\}', explicit[1]))
    if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes):
        shape = tuple(map(int, iota[3].split(',')))
        order = tuple(map(int, iota[4].split(','))) if iota[4] else range(len(shape))
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose(tuple(order))
        return tuple(map(tuple, numbers.reshape(int(iota[1]), int(iota[2])).tolist()))
    if mesh_groups := re.search(r'replica_groups=mesh\[([^\]]*)\](?: ?\{([^}]*)\})?', attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh_groups[1])}
        reduced_axes = re.findall(r"'([^']+)'", mesh_groups[2] or '')
        numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        others = [dimension for dimension, name in enumerate(sizes) if name not in reduced_axes]
        reordered = numbers.transpose(
            (*others, *(dimension for dimension, name in enumerate(sizes) if name in reduced_axes))
        )
        return tuple(map(tuple, reordered.reshape(-1, math.prod(sizes[name] for name in reduced_axes)).tolist()))
    if pairs := re.search(r'source_target_pairs=\{(\{[\d,{}]*\})\}', attributes):
        return tuple(tuple(map(int, pair.split(','))) for pair in re.findall(r'\{([\d,]+)\}', pairs[1]))
    raise ValueError(f'unknown format of the devices of a collective: {attributes[:200]}')


def find_crossed_axes(collective: Collective, mesh: jax.sharding.Mesh) -> str:
    """Return the mesh axes that a collective crosses."""
    coordinate_AN = np.array(np.unravel_index(collective.replica_groups[0], mesh.devices.shape))
    return ','.join(
        axis for axis, coordinates in zip(mesh.axis_names, coordinate_AN, strict=True) if len(set(coordinates)) > 1
    )
