"""Published peak FLOP/s, memory and bandwidth of accelerators."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChipSpec:
    """Peak rates of an accelerator in bytes, seconds, and dense bfloat16 FLOPs summed in float32."""

    device_kinds: tuple[str, ...]  # values of `device_kind` of jax devices
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float  # memory bandwidth
    source: str
    devices_per_chip: int = 1  # jax devices of a chip, which share these rates and this memory


CLOUD_TPU_SOURCE = 'docs.cloud.google.com/tpu/docs/{}, November 2026'
NVIDIA_SOURCE = 'NVIDIA, data sheet of the {}'
BYTES_PER_GIB = 2**30
NUM_LANES = 128  # of a vector register of a TPU: numbers of the last dimension of an array that are stored together

CHIPS = {
    'v4': ChipSpec(('TPU v4',), 275e12, 32 * BYTES_PER_GIB, 1200e9, CLOUD_TPU_SOURCE.format('v4')),
    'v5e': ChipSpec(('TPU v5 lite', 'TPU v5e'), 197e12, 16 * BYTES_PER_GIB, 819e9, CLOUD_TPU_SOURCE.format('v5e')),
    'v5p': ChipSpec(('TPU v5p', 'TPU v5'), 459e12, 95 * BYTES_PER_GIB, 2765e9, CLOUD_TPU_SOURCE.format('v5p')),
    'v6e': ChipSpec(('TPU v6 lite', 'TPU v6e'), 918e12, 32 * BYTES_PER_GIB, 1638e9, CLOUD_TPU_SOURCE.format('v6e')),
    'tpu7x': ChipSpec(('TPU7x',), 2307e12, 192 * BYTES_PER_GIB, 7380e9, CLOUD_TPU_SOURCE.format('tpu7x'), 2),
    'a100': ChipSpec(('NVIDIA A100-SXM4-80GB',), 312e12, 80e9, 2039e9, NVIDIA_SOURCE.format('A100 SXM 80GB')),
    'h100': ChipSpec(('NVIDIA H100 80GB HBM3',), 989e12, 80e9, 3350e9, NVIDIA_SOURCE.format('H100 SXM')),
    'h200': ChipSpec(('NVIDIA H200',), 989e12, 141e9, 4800e9, NVIDIA_SOURCE.format('H200 SXM')),
    'b200': ChipSpec(('NVIDIA B200',), 2250e12, 180e9, 8000e9, NVIDIA_SOURCE.format('HGX B200')),
}


def find_chip(device_kind: str) -> ChipSpec | None:
    """Return the spec of a jax device_kind; None if it is not listed, as for other cards with that chip."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def get_peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of one jax device."""
    chip = find_chip(device_kind)
    return chip.flops_per_second / chip.devices_per_chip if chip else None
