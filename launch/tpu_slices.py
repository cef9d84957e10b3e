"""TPU generations, slice topologies, and the options that request them."""

import argparse
import dataclasses
import math

from sinklab.cli.flag_types import positive_int
from sinklab.errors import UserError

TOPOLOGIES_2D = '1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'
TOPOLOGIES_3D = '2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'


@dataclasses.dataclass(frozen=True)
class TpuKind:
    """A TPU generation."""

    accelerator_type: str  # prefix of the accelerator type of Cloud TPU, as in v5litepod-256
    cores_per_chip: int  # factor from chips to the number in the accelerator type
    runtime_version: str
    gke_accelerator: str
    topologies: tuple[str, ...]
    max_single_host_chips: int  # chips of the largest slice with one host; hosts of larger slices have 4 chips each

    @property
    def topology_by_chips(self) -> dict[int, str]:
        return {math.prod(map(int, topology.split('x'))): topology for topology in self.topologies}


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
        return self.kind.topology_by_chips[self.chips]

    @property
    def num_hosts(self) -> int:
        return 1 if self.chips <= self.kind.max_single_host_chips else self.chips // 4

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.num_hosts


def parse_slice(text: str) -> TpuSlice:
    name, _, chips = text.rpartition('-')
    kind = TPU_KINDS.get(name)
    if kind is None or not chips.isdecimal() or int(chips) not in kind.topology_by_chips:
        allowed = '; '.join(
            f'{name}-{", ".join(map(str, kind.topology_by_chips))}' for name, kind in TPU_KINDS.items()
        )
        raise UserError(f'--accelerator={text} is not KIND-CHIPS; use {allowed}')
    return TpuSlice(kind, int(chips))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--accelerator', metavar='KIND-CHIPS', help='kind and number of chips, such as v5e-256')
    parser.add_argument('--slices', type=positive_int, default=1, metavar='N', help='number of slices (default: 1)')
    parser.add_argument('--spot', action='store_true', help='use preemptible machines')
