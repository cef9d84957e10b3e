"""Search for the parallelism layout with the lowest estimated step time."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax

from sinklab.chip_specs import BYTES_PER_GIB, ChipSpec
from sinklab.config.spec import Hardware, Spec
from sinklab.errors import UserError
from sinklab.model import flops
from sinklab.parallel import device_mesh
from sinklab.train import memory_estimate, state

MICRO_BATCH_COUNTS = (1, 2, 4, 8, 16)  # numbers of micro-batches to try


@dataclasses.dataclass(frozen=True)
class LayoutCandidate:
    """A candidate layout: its memory and step time, or why it is rejected."""

    hardware: Hardware
    bytes: int | None = None  # on one device; None if the layout is invalid for the devices
    seconds: float = 0.0  # estimated computation plus communication of a step, without overlap
    refused: str = ''


def rank_layouts(
    spec: Spec, requested: Hardware, target_devices: Sequence[jax.Device], chip: ChipSpec, backend: str
) -> tuple[list[LayoutCandidate], list[LayoutCandidate]]:
    """Return (layouts that fit, fastest first; layouts that are rejected).

    Options that `requested` sets are kept.
    """
    slices = device_mesh.group_by_slice(target_devices)
    entries = [
        evaluate_layout(spec, hardware, target_devices, chip, backend)
        for hardware in generate_layouts(spec, requested, len(target_devices), len(slices))
    ]
    # Layouts whose times differ only by rounding are ordered by memory.
    fitting_entries = sorted(
        (entry for entry in entries if not entry.refused),
        key=lambda entry: (float(f'{entry.seconds:.6g}'), entry.bytes),
    )
    return fitting_entries, [entry for entry in entries if entry.refused]


def evaluate_layout(
    spec: Spec, hardware: Hardware, target_devices: Sequence[jax.Device], chip: ChipSpec, backend: str
) -> LayoutCandidate:
    usable_bytes = memory_estimate.USABLE_MEMORY_FRACTION * chip.memory_bytes / chip.devices_per_chip
    try:
        mesh = device_mesh.make_mesh(hardware, target_devices)
        memory_estimate.check_layout(spec, hardware, mesh)
    except UserError as error:
        return LayoutCandidate(hardware, refused=str(error))
    needed_bytes = memory_estimate.estimate_memory(spec, hardware, mesh, backend).total
    message = (
        f'{needed_bytes / BYTES_PER_GIB:.1f} GiB, of {usable_bytes / BYTES_PER_GIB:.1f} usable '
        f'({memory_estimate.USABLE_MEMORY_FRACTION:.0%} of the memory)'
    )
    reason = message if needed_bytes > usable_bytes else ''
    return LayoutCandidate(hardware, needed_bytes, estimate_step_seconds(spec, hardware, mesh, chip), reason)


def generate_layouts(spec: Spec, requested: Hardware, num_devices: int, num_slices: int) -> Iterator[Hardware]:
    """Generate layouts in which only gradients are sent between slices, unless options say otherwise."""
    batch_size, num_batch_shards = spec.optimizer.batch_size, num_devices // requested.tensor
    shards_per_slice = num_batch_shards // num_slices
    sizes = (
        [shards_per_slice]
        if num_slices > 1
        else [size for size in range(1, shards_per_slice + 1) if shards_per_slice % size == 0]
    )
    fsdp_sizes = [requested.fsdp] if requested.fsdp else sizes
    micro_batches = (
        [requested.get_micro_batch_size(batch_size)]
        if requested.micro_batch != 'default'
        else [batch_size // parts for parts in MICRO_BATCH_COUNTS if batch_size % parts == 0]
    )
    is_remat_given = requested.remat not in ('default', 'auto')
    remat_policies = (requested.remat,) if is_remat_given else memory_estimate.REMAT_POLICIES[1:]
    for fsdp, micro_batch, remat in itertools.product(fsdp_sizes, micro_batches, remat_policies):
        if not requested.data or requested.data * fsdp == num_batch_shards:
            yield dataclasses.replace(
                requested, data=num_batch_shards // fsdp, fsdp=fsdp, micro_batch=micro_batch, remat=remat
            )


def estimate_step_seconds(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, chip: ChipSpec) -> float:
    """Estimate compute time at the peak plus communication time, without overlap."""
    model, length = spec.model, spec.data.length
    tokens_per_device = spec.optimizer.batch_size * length / mesh.size
    flops_per_token = flops.TRAINING_FLOPS_FACTOR * flops.count_forward_flops(
        model, length
    ).total + flops.count_recompute_flops(model, length, hardware.remat)
    compute_seconds = tokens_per_device * flops_per_token / (chip.flops_per_second / chip.devices_per_chip)
    return compute_seconds + estimate_sent_bytes(spec, hardware, mesh) / (
        chip.link_bytes_per_second / chip.devices_per_chip
    )


def estimate_sent_bytes(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh) -> float:
    """Estimate the bytes that a device sends per step, along fsdp and then along data."""
    parameter_bytes = state.count_bytes(state.get_state_shapes(spec)['params']) / mesh.shape['tensor']
    batch_size = spec.optimizer.batch_size
    num_micro_batches = batch_size // hardware.get_micro_batch_size(batch_size)
    dtype_factor = 0.5 if spec.model.dtype == 'bfloat16' else 1.0
    fsdp, data = mesh.shape['fsdp'], mesh.shape['data']
    return (
        num_micro_batches * parameter_bytes * (2 * dtype_factor + 1) * (fsdp - 1) / fsdp
        + 2 * parameter_bytes / fsdp * (data - 1) / data
    )
