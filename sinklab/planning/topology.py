"""Descriptions of devices that are not attached, for compilation: TPUs, and GPUs of one Hopper node."""

import importlib.util
import os
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from sinklab.chip_specs import CHIPS
from sinklab.errors import UserError, format_error, format_extra_command

REPOSITORY_LIBTPU = (
    Path(__file__).parents[2] / '.venv' / 'libtpu' / 'libtpu' / 'libtpu.so'
)  # where `make test` puts it
# Several processes may compile at the same time, and none of them may look for a chip.
LIBTPU_ENVIRONMENT = dict(
    ALLOW_MULTIPLE_LIBTPU_LOAD='1',
    TPU_SKIP_MDS_QUERY='1',
    TPU_WORKER_HOSTNAMES='localhost',
    TPU_ACCELERATOR_TYPE='v5litepod-4',  # libtpu requires a value, whatever its target is
)
# Number of dimensions of the topology of a slice.
NUM_TOPOLOGY_DIMENSIONS = {'v4': 3, 'v5e': 2, 'v5p': 3, 'v6e': 2, 'tpu7x': 3}


def find_libtpu() -> str | None:
    """Return the path of libtpu: TPU_LIBRARY_PATH, that of `make test`, or that of the environment."""
    if configured_path := os.environ.get('TPU_LIBRARY_PATH'):
        return configured_path
    if REPOSITORY_LIBTPU.exists():
        return str(REPOSITORY_LIBTPU)
    module_spec = importlib.util.find_spec('libtpu')
    return str(Path(module_spec.origin).parent / 'libtpu.so') if module_spec else None


# XLA's GpuTargetConfigProto of a Hopper GPU, with placeholders for the size and bandwidth of its memory.
HOPPER_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: {memory:.0f} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 13 }}
device_description_str: "{kind}"
"""


def parse_topology(topology: str) -> tuple[str, list[jax.Device]]:
    """Parse CHIP:SHAPE or SLICESxCHIP:SHAPE into (name in CHIPS, devices).

    Raises:
        UserError: The topology is unknown, or its compiler is not installed.
    """
    match = re.fullmatch(r'(?:([1-9]\d*)x)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)', topology)
    if not match or match[2] not in CHIPS:
        raise UserError(
            f'--topology={topology} is unknown; give a chip and a shape, such as v5e:16x16, 2xv5e:8x8 or h100:8'
        )
    _, chip_name, shape = match.groups()
    if CHIPS[chip_name].device_kinds[0].startswith('NVIDIA'):
        return chip_name, make_gpu_devices(topology, chip_name)
    if len(shape.split('x')) != NUM_TOPOLOGY_DIMENSIONS[chip_name]:
        num_dimensions = NUM_TOPOLOGY_DIMENSIONS[chip_name]
        raise UserError(
            f'--topology={topology}: {chip_name} topologies have {num_dimensions} dimensions, '
            f'such as {chip_name}:{"x".join(["4"] * num_dimensions)}'
        )
    return chip_name, make_tpu_devices(f'{chip_name}:{shape}', int(match[1] or 1))


def make_gpu_devices(topology: str, chip_name: str) -> list[jax.Device]:
    """Make the devices of one Hopper node for compilation.

    More nodes are not supported, because jax does not describe the boundaries between them.

    Raises:
        UserError: The topology is not one Hopper node, or the compiler for GPUs is not installed.
    """
    match = re.fullmatch(r'(h100|h200):([1-8])', topology)
    chip = CHIPS[chip_name]
    if not match:
        raise UserError(
            f'--topology={topology} is not supported; of GPUs give one node of Hopper, h100:1 to h100:8 or '
            'h200:1 to h200:8'
        )
    if not has_cuda_plugin():
        raise UserError(
            'the compiler for GPUs is not installed; install it (this machine needs no GPU): '
            "pip install 'jax[cuda13]'"
        )
    target = HOPPER_TARGET_CONFIG.format(
        bandwidth=chip.memory_bytes_per_second, memory=chip.memory_bytes, kind=chip.device_kinds[0]
    )
    return topologies.get_topology_desc(platform='cuda', target_config=target, topology=f'1x1x{match[2]}').devices


def has_cuda_plugin() -> bool:
    """Return whether jax has a plugin for CUDA."""
    if importlib.util.find_spec('jax_plugins') is None:
        return False
    plugins = pkgutil.iter_modules(importlib.import_module('jax_plugins').__path__)
    return any(module.name.startswith('xla_cuda') for module in plugins)


def find_wraparound_links(shape: Sequence[int]) -> tuple[bool, bool, bool]:
    """Return which dimensions of a slice are closed by links from the last chip to the first.

    In three dimensions these are all dimensions of slices that consist of whole cubes of 4x4x4 chips, in two
    dimensions those of 16 chips (Cloud TPU documentation of v5p, v5e and v6e).
    """
    if len(shape) == 2:
        return shape[0] == 16, shape[1] == 16, False
    return (all(size % 4 == 0 for size in shape),) * 3


def make_tpu_devices(topology: str, num_slices: int = 1) -> list[jax.Device]:
    """Make the devices of a TPU topology, such as v5e:2x2, for compilation.

    Raises:
        UserError: libtpu is not installed, or it does not know the topology.
    """
    if (path := find_libtpu()) is None:
        raise UserError(
            f'libtpu, which has the compiler for TPUs, is not installed; install it: {format_extra_command("tpu")}'
        )
    os.environ.update(
        {name: value for name, value in LIBTPU_ENVIRONMENT.items() if name not in os.environ}, TPU_LIBRARY_PATH=path
    )
    try:
        options: dict[str, Any] = dict(
            wrap=find_wraparound_links([int(size) for size in topology.partition(':')[2].split('x')])
        )
        options |= dict(num_slices=num_slices) if num_slices > 1 else {}
        return topologies.get_topology_desc(platform='tpu', topology_name=topology, **options).devices
    except Exception as error:  # of whatever type libtpu raises
        raise UserError(f'{topology} is not a topology of libtpu ({format_error(error)})') from error
