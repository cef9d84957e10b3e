"""Devices that are not here, to compile for: TPUs by libtpu, Hopper by jax's plugin for CUDA; neither needs any."""

import importlib.util
import os
import pkgutil
import re
from pathlib import Path

import jax
from jax.experimental import topologies

from sinklab.chips import CHIPS
from sinklab.install import format_extra_command, format_package_command
from sinklab.record import Refusal

LIBTPU = Path(__file__).parents[1] / '.venv' / 'libtpu' / 'libtpu' / 'libtpu.so'  # where `make test` puts it
# Several processes may compile at once, and none is to look for a chip.
ALONE = dict(
    ALLOW_MULTIPLE_LIBTPU_LOAD='1',
    TPU_SKIP_MDS_QUERY='1',
    TPU_WORKER_HOSTNAMES='localhost',
    TPU_ACCELERATOR_TYPE='v5litepod-4',  # asked for by libtpu, whatever it compiles for
)
# In how many dimensions the chips of a slice stand.
DIMENSIONS = {'v4': 3, 'v5e': 2, 'v5p': 3, 'v6e': 2, 'tpu7x': 3}


def library() -> str | None:
    """The path of libtpu: what TPU_LIBRARY_PATH says, `make test` has installed, or is installed beside jax."""
    if given := os.environ.get('TPU_LIBRARY_PATH'):
        return given
    if LIBTPU.exists():
        return str(LIBTPU)
    found = importlib.util.find_spec('libtpu')
    return str(Path(found.origin).parent / 'libtpu.so') if found else None


def version() -> str | None:
    """Of the library, as its installer has written beside it."""
    installed = Path(path).parents[1].glob('libtpu-*.dist-info') if (path := library()) else ()
    return next((folder.stem.removeprefix('libtpu-') for folder in installed), None)


# What XLA asks of a GPU, as its GpuTargetConfigProto: Hopper, with so much memory of such a speed.
HOPPER = """
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


def described(topology: str) -> tuple[str, list[jax.Device]]:
    """(name in CHIPS, its devices) of CHIP:SHAPE, or of SLICESxCHIP:SHAPE; raises Refusal."""
    parts = re.fullmatch(r'(?:([1-9]\d*)x)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)', topology)
    if not parts or parts[2] not in CHIPS:
        raise Refusal(
            f'--topology={topology} is unknown; give a chip and a shape, such as v5e:16x16, 2xv5e:8x8 or h100:8'
        )
    _, name, shape = parts.groups()
    if CHIPS[name].kinds[0].startswith('NVIDIA'):
        return name, gpus(topology, name)
    if len(shape.split('x')) != DIMENSIONS[name]:
        such = 'x'.join(['4'] * DIMENSIONS[name])
        raise Refusal(
            f'--topology={topology}: chips of {name} stand in {DIMENSIONS[name]} dimensions, such as {name}:{such}'
        )
    return name, devices(f'{name}:{shape}', int(parts[1] or 1))


def gpus(topology: str, name: str) -> list[jax.Device]:
    """Those of one node of Hopper; raises Refusal. Of more nodes jax describes no borders."""
    parts, chip = re.fullmatch(r'(h100|h200):([1-8])', topology), CHIPS[name]
    if not parts:
        raise Refusal(
            f'--topology={topology} cannot be compiled for; of GPUs give one node of Hopper, h100:1 to h100:8 or '
            'h200:1 to h200:8'
        )
    if not has_plugin():
        raise Refusal(
            'the compiler for GPUs is not installed; install it, where there need be no GPU: '
            f'{format_package_command("jax[cuda13]")}'
        )
    target = HOPPER.format(bandwidth=chip.bandwidth, memory=chip.memory, kind=chip.kinds[0])
    return topologies.get_topology_desc(platform='cuda', target_config=target, topology=f'1x1x{parts[2]}').devices


def has_plugin() -> bool:
    """Whether jax has a plugin for CUDA."""
    if importlib.util.find_spec('jax_plugins') is None:
        return False
    plugins = pkgutil.iter_modules(importlib.import_module('jax_plugins').__path__)
    return any(module.name.startswith('xla_cuda') for module in plugins)


def devices(topology: str, slices: int = 1) -> list[jax.Device]:
    """Those of a topology such as v5e:2x2, to compile for; raises Refusal."""
    if (path := library()) is None:
        raise Refusal(
            f'libtpu, which has the compiler for TPUs, is not installed; install it: {format_extra_command("tpu")}'
        )
    os.environ.update({name: value for name, value in ALONE.items() if name not in os.environ}, TPU_LIBRARY_PATH=path)
    try:
        more = dict(num_slices=slices) if slices > 1 else {}
        return topologies.get_topology_desc(platform='tpu', topology_name=topology, **more).devices
    except Exception as error:  # what libtpu makes of a name is its own affair
        raise Refusal(f'{topology} is no topology that libtpu knows ({str(error).splitlines()[0]})') from error
