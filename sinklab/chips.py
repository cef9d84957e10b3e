"""What chips can do, as their makers publish it. No figure here is measured."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """In bytes, seconds, and bfloat16 products that are summed in float32, without sparsity."""

    kinds: tuple[str, ...]  # what jax says of a device: its device_kind
    peak: float  # operations a second
    memory: float  # bytes
    bandwidth: float  # of that memory
    links: float  # that it sends a second to its neighbours or to its node, over all links together
    source: str
    devices: int = 1  # of jax, which share what is said above
    clock: float | None = None  # cycles a second, where the peak and the size of its matrix units say that


CLOUD = 'docs.cloud.google.com/tpu/docs/{}, November 2026; links: half of what it calls bidirectional'
NVIDIA = 'NVIDIA, data sheet of the {}; links: half of the bandwidth of NVLink'
JOUPPI = CLOUD.format('v4') + '; links: Jouppi et al. (2023)'
GIB = 2**30

CHIPS = {
    'v4': Chip(('TPU v4',), 275e12, 32 * GIB, 1200e9, 300e9, JOUPPI, clock=1.05e9),
    'v5e': Chip(('TPU v5 lite', 'TPU v5e'), 197e12, 16 * GIB, 819e9, 200e9, CLOUD.format('v5e'), clock=1.5e9),
    'v5p': Chip(('TPU v5p', 'TPU v5'), 459e12, 95 * GIB, 2765e9, 600e9, CLOUD.format('v5p'), clock=1.75e9),
    'v6e': Chip(('TPU v6 lite', 'TPU v6e'), 918e12, 32 * GIB, 1638e9, 400e9, CLOUD.format('v6e')),
    'tpu7x': Chip(('TPU7x',), 2307e12, 192 * GIB, 7380e9, 600e9, CLOUD.format('tpu7x'), devices=2),
    'a100': Chip(('NVIDIA A100-SXM4-80GB',), 312e12, 80e9, 2039e9, 300e9, NVIDIA.format('A100 SXM 80GB')),
    'h100': Chip(('NVIDIA H100 80GB HBM3',), 989e12, 80e9, 3350e9, 450e9, NVIDIA.format('H100 SXM')),
    'h200': Chip(('NVIDIA H200',), 989e12, 141e9, 4800e9, 450e9, NVIDIA.format('H200 SXM')),
    'b200': Chip(('NVIDIA B200',), 2250e12, 180e9, 8000e9, 900e9, NVIDIA.format('HGX B200')),
}


def chip_of(kind: str) -> Chip | None:
    """That of a device_kind of jax; None for what is not listed, such as another card with the same chip."""
    return next((chip for chip in CHIPS.values() if kind in chip.kinds), None)


def peak_of(kind: str) -> float | None:
    """Operations a second of one device of jax."""
    chip = chip_of(kind)
    return chip.peak / chip.devices if chip else None
