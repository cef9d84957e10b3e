"""The device mesh (data, fsdp, tensor), arranged by network topology, and device memory."""

import contextlib
import functools
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from sinklab import xla_faults
from sinklab.config.spec import Layout
from sinklab.errors import UserError, format_error

MESH_AXES = ('data', 'fsdp', 'tensor')


def make_mesh(layout: Layout, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Make the mesh of all devices; by default `fsdp` is within a slice and `data` across slices.

    A slice is a group of devices with a fast network: a TPU slice or a GPU node.
    """
    devices = get_devices() if devices is None else devices
    slices = group_by_slice(devices)
    return jax.sharding.Mesh(
        arrange_devices(compute_mesh_shape(layout, len(devices), len(slices)), slices),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def make_abstract_mesh(layout: Layout) -> jax.sharding.AbstractMesh:
    """Make a mesh without devices, to check a layout while another process uses the devices.

    An axis without a requested size counts as 1.
    """
    return jax.sharding.AbstractMesh(tuple(getattr(layout, axis) or 1 for axis in MESH_AXES), MESH_AXES)


@functools.cache
def make_one_device_mesh() -> jax.sharding.Mesh:
    """Make the mesh of the first device."""
    return make_mesh(Layout(), get_devices()[:1])


def split_cpu_devices(layout: Layout, num_processes: int = 1) -> None:
    """Split the CPU into the devices of a layout, unless the user set a number or jax has started."""
    num_devices = math.prod(size or 1 for size in (layout.data, layout.fsdp, layout.tensor)) // num_processes
    is_configured = jax.config.jax_num_cpu_devices > 0 or 'host_platform_device_count' in os.environ.get(
        'XLA_FLAGS', ''
    )
    if num_devices > 1 and not is_configured:
        with contextlib.suppress(RuntimeError):
            jax.config.update('jax_num_cpu_devices', num_devices)


def get_devices() -> list[jax.Device]:
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'jax finds no device ({format_error(error)}); set JAX_PLATFORMS, such as JAX_PLATFORMS=cpu'
        ) from error
    if devices[0].platform == 'cpu':
        xla_faults.check_cpu_sums()
    return devices


def get_device_memory_bytes() -> int:
    """Return the memory of each device of this process in bytes; CPU devices share the memory of the host."""
    local_devices = jax.local_devices()
    bytes_limit = (local_devices[0].memory_stats() or {}).get('bytes_limit')
    return bytes_limit or get_host_memory_bytes() // len(local_devices)


def get_host_memory_bytes() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def get_available_memory_bytes() -> int:
    """Return the memory in bytes that processes on this host can still take."""
    with contextlib.suppress(OSError):
        if match := re.search(r'^MemAvailable: +(\d+) kB$', Path('/proc/meminfo').read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return get_host_memory_bytes()


def group_by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, 'slice_index', None) or 0, []).append(device)
    return [slices[index] for index in sorted(slices)]


def compute_mesh_shape(layout: Layout, num_devices: int, num_slices: int = 1) -> tuple[int, int, int]:
    """Return the sizes of the mesh axes; raise UserError if devices would be idle or are too few."""
    data, fsdp, tensor = layout.data, layout.fsdp, layout.tensor
    devices_per_tensor_shard = num_devices // tensor
    if fsdp is None:
        fsdp = devices_per_tensor_shard // (data or num_slices) or 1
    data = data or devices_per_tensor_shard // fsdp or 1
    if data * fsdp * tensor != num_devices:
        sizes = {axis: getattr(layout, axis) for axis in MESH_AXES}
        flags = ' '.join(f'--{axis}={size}' for axis, size in sizes.items() if size)
        raise UserError(
            f'{flags} does not fit {num_devices} devices; give sizes whose product is {num_devices}, or remove '
            '--data and --fsdp'
        )
    return data, fsdp, tensor


def arrange_devices(mesh_shape: tuple[int, int, int], slices: list[list[jax.Device]]) -> np.ndarray:
    """Arrange devices as a mesh, with neighbors adjacent and slices along the first axis they divide."""
    num_slices = len(slices)
    slice_sizes = {len(slice_devices) for slice_devices in slices}
    slice_axis = next((axis for axis, size in enumerate(mesh_shape[:2]) if size % num_slices == 0), None)
    if slice_axis is None or len(slice_sizes) > 1:
        raise UserError(
            f'{" x ".join(map(str, mesh_shape))} devices (data, fsdp, tensor) cannot be arranged on '
            f'{num_slices} slices of {" or ".join(map(str, sorted(slice_sizes)))}; '
            f'give a multiple of {num_slices} as --data'
        )
    shape_within_slice = [size // num_slices if axis == slice_axis else size for axis, size in enumerate(mesh_shape)]
    arrange_slice = functools.partial(
        mesh_utils.create_device_mesh, shape_within_slice, allow_split_physical_axes=True
    )
    return np.concatenate([arrange_slice(slice_devices) for slice_devices in slices], axis=slice_axis)


def find_rings(mesh: jax.sharding.Mesh) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the physical TPU rings along each mesh axis, the outermost first."""
    devices_by_axis = {
        axis: np.moveaxis(mesh.devices, index, 0).reshape(size, -1)[:, 0]
        for index, (axis, size) in enumerate(mesh.shape.items())
    }
    return {
        axis: factor_into_rings([getattr(device, 'coords', ()) for device in axis_devices])
        for axis, axis_devices in devices_by_axis.items()
    }


def factor_into_rings(coords: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Factor the devices of a mesh axis into physical rings.

    A ring ends where neighbours differ in more than one coordinate.

    Returns:
        The sizes of the rings, the outermost first; their product is the number of devices.
    """
    ring_ends = [
        index
        for index, (coord, next_coord) in enumerate(itertools.pairwise(coords), 1)
        if sum(a != b for a, b in zip(coord, next_coord, strict=True)) > 1
    ]
    if not ring_ends or ring_ends[0] == 1 or len(coords) % ring_ends[0]:
        return (len(coords),)
    return *factor_into_rings(coords[:: ring_ends[0]]), ring_ends[0]
