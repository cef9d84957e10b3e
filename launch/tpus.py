"""Cloud TPUs: what each kind is called by whom, how its slices are laid out, and how they are asked for."""

import argparse
import dataclasses

from launch.command import at_least, check_layout, needed
from launch.job import Refusal

FLAT = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
CUBES = {4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8', 512: '8x8x8'}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A generation of chips."""

    queued: str  # the accelerator type of Cloud TPU is this, - and a number
    cores: int  # of a chip, in that number
    runtime: str
    gke: str
    topologies: dict[int, str]
    alone: int  # chips of the largest slice of one host; hosts of larger ones have four


# Names and runtimes are as Google's pages have them in November 2026; none has been asked for.
KINDS = {
    'v4': Kind('v4', 2, 'tpu-ubuntu2204-base', 'tpu-v4-podslice', CUBES, 4),
    'v5e': Kind('v5litepod', 1, 'v2-alpha-tpuv5-lite', 'tpu-v5-lite-podslice', FLAT, 8),
    'v5p': Kind('v5p', 2, 'v2-alpha-tpuv5', 'tpu-v5p-slice', CUBES, 4),
    'v6e': Kind('v6e', 1, 'v2-alpha-tpuv6e', 'tpu-v6e-slice', FLAT, 8),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A number of chips of one kind, given as KIND-CHIPS."""

    kind: Kind
    chips: int

    @property
    def queued(self) -> str:
        return f'{self.kind.queued}-{self.chips * self.kind.cores}'

    @property
    def topology(self) -> str:
        return self.kind.topologies[self.chips]

    @property
    def hosts(self) -> int:
        return 1 if self.chips <= self.kind.alone else self.chips // 4

    @property
    def chips_of_host(self) -> int:
        return self.chips // self.hosts


def slice_of(given: str) -> Slice:
    name, _, chips = given.rpartition('-')
    kind = KINDS.get(name)
    if kind is None or not chips.isdecimal() or int(chips) not in kind.topologies:
        allowed = '; '.join(f'{name}-{", ".join(map(str, kind.topologies))}' for name, kind in KINDS.items())
        raise Refusal(f'--accelerator={given} is no KIND-CHIPS; there are {allowed}')
    return Slice(kind, int(chips))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--accelerator', metavar='KIND-CHIPS', help='such as v5e-256')
    parser.add_argument('--slices', type=int, default=1, metavar='N', help='of so many chips each; %(default)s')
    parser.add_argument('--spot', action='store_true', help='machines that may be taken away')


def check(given: argparse.Namespace) -> None:
    at_least(given, slices=1)
    if given.accelerator:
        slice_of(given.accelerator)


def check_run(arguments: tuple[str, ...], given: argparse.Namespace) -> None:
    """Refuses a run that its slices cannot hold, before anybody waits for them."""
    needed(given, accelerator='v5e-256')
    devices = given.slices * slice_of(given.accelerator).chips
    check_layout(arguments, devices, f'{given.slices} x {given.accelerator}')
