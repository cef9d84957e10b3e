"""TPU generations, slice topologies, and the options that request them."""

import argparse
import dataclasses

from launch.command_line import check_layout, check_minimum, require_options
from sinklab.errors import UserError

TOPOLOGIES_2D = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
TOPOLOGIES_3D = {
    4: '2x2x1',
    8: '2x2x2',
    16: '2x2x4',
    32: '2x4x4',
    64: '4x4x4',
    128: '4x4x8',
    256: '4x8x8',
    512: '8x8x8',
}


@dataclasses.dataclass(frozen=True)
class TpuKind:
    """A TPU generation."""

    accelerator_type: str  # prefix of the accelerator type of Cloud TPU, as in v5litepod-256
    cores_per_chip: int  # factor from chips to the number in the accelerator type
    runtime_version: str
    gke_accelerator: str
    topologies: dict[int, str]  # {number of chips: topology}
    max_single_host_chips: int  # chips of the largest slice with one host; hosts of larger slices have 4 chips each


# Names and runtimes are those of Google's documentation in November 2026. None was requested from Google Cloud.
TPU_KINDS = {
    'v4': TpuKind('v4', 2, 'tpu-ubuntu2204-base', 'tpu-v4-podslice', TOPOLOGIES_3D, 4),
    'v5e': TpuKind('v5litepod', 1, 'v2-alpha-tpuv5-lite', 'tpu-v5-lite-podslice', TOPOLOGIES_2D, 8),
    'v5p': TpuKind('v5p', 2, 'v2-alpha-tpuv5', 'tpu-v5p-slice', TOPOLOGIES_3D, 4),
    'v6e': TpuKind('v6e', 1, 'v2-alpha-tpuv6e', 'tpu-v6e-slice', TOPOLOGIES_2D, 8),
}


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """A number of chips of one kind, given as KIND-CHIPS."""

    kind: TpuKind
    chips: int

    @property
    def accelerator_type(self) -> str:
        return f'{self.kind.accelerator_type}-{self.chips * self.kind.cores_per_chip}'

    @property
    def topology(self) -> str:
        return self.kind.topologies[self.chips]

    @property
    def num_hosts(self) -> int:
        return 1 if self.chips <= self.kind.max_single_host_chips else self.chips // 4

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.num_hosts


def parse_slice(text: str) -> TpuSlice:
    name, _, chips = text.rpartition('-')
    kind = TPU_KINDS.get(name)
    if kind is None or not chips.isdecimal() or int(chips) not in kind.topologies:
        allowed = '; '.join(f'{name}-{", ".join(map(str, kind.topologies))}' for name, kind in TPU_KINDS.items())
        raise UserError(f'--accelerator={text} is not KIND-CHIPS; use {allowed}')
    return TpuSlice(kind, int(chips))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--accelerator', metavar='KIND-CHIPS', help='kind and number of chips, such as v5e-256')
    parser.add_argument(
        '--slices', type=int, default=1, metavar='N', help='number of slices of that size (default: %(default)s)'
    )
    parser.add_argument('--spot', action='store_true', help='use preemptible machines')


def check_options(args: argparse.Namespace) -> None:
    check_minimum(args, slices=1)
    if args.accelerator:
        parse_slice(args.accelerator)


def check_run(arguments: tuple[str, ...], args: argparse.Namespace) -> None:
    """Raise UserError if the mesh sizes of a run do not fit its slices, before the job waits for TPUs.

    Args:
        arguments: the arguments of `sinklab train`.
        args: the options of the launcher.
    """
    require_options(args, accelerator='v5e-256')
    devices = args.slices * parse_slice(args.accelerator).chips
    check_layout(arguments, devices, f'{args.slices} x {args.accelerator}')
