"""Which layout of a run costs least, by formula: candidates for the compiler to look at."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax

from sinklab import devices
from sinklab.chips import Chip
from sinklab.model import flops
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import fit, layout, memory, state

MICRO = (1, 2, 4, 8, 16)  # into how many parts a batch may be divided


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to lay a run on devices: what it would take, or why it cannot be."""

    hardware: Hardware
    bytes: int | None = None  # on a device; None where it cannot be laid on them
    seconds: float = 0.0  # a step, at least
    refused: str = ''


def candidates(
    spec: Spec, given: Hardware, found: Sequence[jax.Device], chip: Chip, backend: str
) -> tuple[list[Candidate], list[Candidate]]:
    """(those that fit, the quickest first; those that do not). What is given is kept, but for --remat=none."""
    slices = devices.by_slice(found)
    known = [
        candidate(spec, hardware, found, chip, backend) for hardware in layouts(spec, given, len(found), len(slices))
    ]
    # Of what differs in rounding alone, that which takes least memory.
    fitting = sorted(
        (one for one in known if not one.refused), key=lambda one: (float(f'{one.seconds:.6g}'), one.bytes)
    )
    return fitting, [one for one in known if one.refused]


def candidate(spec: Spec, hardware: Hardware, found: Sequence[jax.Device], chip: Chip, backend: str) -> Candidate:
    room = fit.USABLE * chip.memory / chip.devices
    try:
        mesh = devices.mesh(hardware, found)
        layout.check(spec, hardware, mesh)
    except Refusal as refusal:
        return Candidate(hardware, refused=str(refusal))
    bytes = memory.held(spec, hardware, mesh, backend).total
    said = f'{bytes / fit.GIB:.1f} GiB, of {room / fit.GIB:.1f} that are {fit.USABLE:.0%} of the memory'
    refused = said if bytes > room else ''
    return Candidate(hardware, bytes, seconds(spec, hardware, mesh, chip), refused)


def layouts(spec: Spec, given: Hardware, count: int, slices: int) -> Iterator[Hardware]:
    """Between slices gradients alone travel, and of each device as little as can be, if nothing else is given."""
    batch, each = spec.optimizer.batch_size, count // given.tensor
    within = each // slices
    sizes = [within] if slices > 1 else [size for size in range(1, within + 1) if within % size == 0]
    shares = [given.fsdp] if given.fsdp else sizes
    micros = [given.micro_batch] if given.micro_batch else [batch // parts for parts in MICRO if batch % parts == 0]
    remats = fit.CHOICES[1:] if given.remat in ('none', 'auto') else (given.remat,)
    for fsdp, micro, remat in itertools.product(shares, micros, remats):
        if not given.data or given.data * fsdp == each:
            yield dataclasses.replace(given, data=each // fsdp, fsdp=fsdp, micro_batch=micro, remat=remat)


def seconds(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, chip: Chip) -> float:
    """Products, and those made again, at the peak; and what travels, as if nothing were computed beside it."""
    model, length = spec.model, spec.data.length
    tokens = spec.optimizer.batch_size * length / mesh.size
    products = flops.TRAINED * flops.forward(model, length).total + flops.again(model, length, hardware.remat)
    computed = tokens * products / (chip.peak / chip.devices)
    return computed + sent(spec, hardware, mesh) / (chip.links / chip.devices)


def sent(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh) -> float:
    """Bytes that a device sends a step: along fsdp parameters twice, rounded, and gradients once; then along data."""
    size = state.size(state.shapes(spec)['params']) / mesh.shape['tensor']
    batch = spec.optimizer.batch_size
    parts = batch // hardware.sequences(batch)
    rounded = 0.5 if spec.model.dtype == 'bfloat16' else 1.0
    fsdp, data = mesh.shape['fsdp'], mesh.shape['data']
    return parts * size * (2 * rounded + 1) * (fsdp - 1) / fsdp + 2 * size / fsdp * (data - 1) / data
