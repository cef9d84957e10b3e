"""The devices of a run as one mesh, whose axes follow the network: slices of TPUs, nodes of GPUs, chips of both."""

import collections
import contextlib
import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from sinklab import program_cache
from sinklab.record import Refusal
from sinklab.spec import Hardware

AXES = ('data', 'fsdp', 'tensor')


def mesh(hardware: Hardware, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """All devices, with the axes that are given and, of those that are not, `fsdp` within a slice and `data` across.

    A slice is what a fast network joins: of TPUs a slice, of GPUs a node.
    """
    devices = found() if devices is None else devices
    slices = by_slice(devices)
    return jax.sharding.Mesh(
        arranged(shape(hardware, len(devices), len(slices)), slices), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def divide_cpu(hardware: Hardware, processes: int = 1) -> None:
    """Has a CPU be as many devices as a layout asks for, where jax is not told how many and has not begun."""
    wanted = math.prod(size or 1 for size in (hardware.data, hardware.fsdp, hardware.tensor)) // processes
    told = jax.config.jax_num_cpu_devices > 0 or 'host_platform_device_count' in os.environ.get('XLA_FLAGS', '')
    if wanted > 1 and not told:
        with contextlib.suppress(RuntimeError):
            jax.config.update('jax_num_cpu_devices', wanted)


def found() -> list[jax.Device]:
    program_cache.install()  # before the first program is compiled, in whatever verb
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise Refusal(f'jax finds no device ({error}); set JAX_PLATFORMS, or see sinklab doctor') from error


def device_memory(processes: int = 1) -> int:
    """Return how many bytes of memory each device of this process has.

    Args:
        processes: How many processes of the run are on this host. The devices of a CPU, of all of them, share its
            memory; an accelerator says how much it has of its own.
    """
    local = jax.local_devices()
    limit = (local[0].memory_stats() or {}).get('bytes_limit')
    return limit or host_memory() // (processes * len(local))


def host_memory() -> int:
    """Return how many bytes this process and its siblings may use: the host's memory or, if less, their cgroup's."""
    return min([os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'), *cgroup_limits()])


def cgroup_limits(groups: Path = Path('/proc/self/cgroup'), mounted: Path = Path('/sys/fs/cgroup')) -> Iterator[int]:
    """Yield the memory limits of this process's control group and of those above it (version 1 and 2), in bytes.

    In a container the group's path may be that of the host, which is not mounted; the mounted root has its limit.
    """
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(':', 2)
            if 'memory' in controllers.split(','):
                root, name = mounted / 'memory', 'memory.limit_in_bytes'
            elif not controllers:
                root, name = mounted, 'memory.max'
            else:
                continue
            folder = root / path.lstrip('/')
            for above in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
                    yield int((above / name).read_text())
                if above == root:
                    break


def by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, 'slice_index', None) or 0, []).append(device)
    return [slices[index] for index in sorted(slices)]


def shape(hardware: Hardware, devices: int, slices: int = 1) -> tuple[int, int, int]:
    """The sizes of the axes; raises Refusal where devices would stand idle, or are too few."""
    data, fsdp, tensor = given = hardware.data, hardware.fsdp, hardware.tensor
    each = devices // tensor
    if fsdp is None:
        fsdp = each // (data or slices) or 1
    data = data or each // fsdp or 1
    if math.prod((data, fsdp, tensor)) == devices:
        return data, fsdp, tensor
    said = ' '.join(f'--{axis}={size}' for axis, size in zip(AXES, given, strict=True) if size)
    wanted = math.prod(size or 1 for size in given)
    if wanted > devices:
        raise Refusal(f'{said} wants {wanted} devices and {devices} are here{shares()}; lower one of them')
    tensor = tensor if devices % (slices * tensor) == 0 else 1
    such = f', such as --data={slices} --fsdp={devices // slices // tensor} --tensor={tensor}'
    raise Refusal(
        f'{said} leaves some of {devices} devices idle{shares()}; give sizes whose product is '
        f'{devices}{"" if devices % slices else such}, or leave --data and --fsdp out'
    )


def arranged(shape: tuple[int, int, int], slices: list[list[jax.Device]]) -> np.ndarray:
    """The devices of a mesh, neighbours next to each other, and slice after slice along the first axis that can."""
    number, sizes = len(slices), {len(one) for one in slices}
    across = next((at for at, size in enumerate(shape[:2]) if size % number == 0), None)
    if across is None or len(sizes) > 1:
        raise Refusal(
            f'{" x ".join(map(str, shape))} devices (data, fsdp, tensor) cannot be laid on {number} slices of '
            f'{" or ".join(map(str, sorted(sizes)))}; give a --data that {number} divides'
        )
    within = [size // number if at == across else size for at, size in enumerate(shape)]
    order = functools.partial(mesh_utils.create_device_mesh, within, allow_split_physical_axes=True)
    return np.concatenate([order(one) for one in slices], axis=across)


def rings(mesh: jax.sharding.Mesh) -> dict[str, tuple[int, ...]]:
    """By axis, how many devices stand in each of the lines of the network that it is made of; the outermost first."""
    lines = {
        axis: np.moveaxis(mesh.devices, at, 0).reshape(size, -1)[:, 0]
        for at, (axis, size) in enumerate(mesh.shape.items())
    }
    return {axis: of_line([getattr(device, 'coords', ()) for device in line]) for axis, line in lines.items()}


def of_line(coords: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """A place where several coordinates change at once ends a line."""
    turns = [at for at, (one, other) in enumerate(itertools.pairwise(coords), 1) if changed(one, other) > 1]
    if not turns or turns[0] == 1 or len(coords) % turns[0]:
        return (len(coords),)
    return *of_line(coords[:: turns[0]]), turns[0]


def changed(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def crossings(mesh: jax.sharding.Mesh) -> dict[str, str]:
    """What each axis of more than one device crosses: slices, hosts, or no more than the devices of a host."""
    lines = {axis: np.moveaxis(mesh.devices, at, 0).reshape(mesh.shape[axis], -1).T for at, axis in enumerate(AXES)}
    return {axis: crossed(found) for axis, found in lines.items() if mesh.shape[axis] > 1}


def crossed(lines: Sequence[Sequence[jax.Device]]) -> str:
    for attribute, name in (('slice_index', 'slices'), ('process_index', 'hosts')):
        if any(len({getattr(device, attribute, 0) for device in line}) > 1 for line in lines):
            return name
    return 'devices'


def shares() -> str:
    """How many devices each of several processes has brought."""
    counts = collections.Counter(device.process_index for device in found())
    own = ', '.join(f'{count} of process {index}' for index, count in sorted(counts.items()))
    return f' ({own})' if len(counts) > 1 else ''
