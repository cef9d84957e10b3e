"""Which layout of a run costs least, by formula: candidates for the compiler to look at."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax

from sinklab import devices
from sinklab.chips import Chip
from sinklab.model import flops
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import fit, layout, state
from sinklab.train.evaluation import most_sequences

MICRO = (1, 2, 4, 8, 16)  # into how many parts a batch may be divided


@dataclasses.dataclass(frozen=True)
class Candidate:
    hardware: Hardware
    bytes: int  # on a device
    seconds: float  # a step, at least


def candidates(spec: Spec, given: Hardware, found: list[jax.Device], chip: Chip, backend: str) -> list[Candidate]:
    """Those that fit, the quickest first; what is given is kept."""
    memory, known = chip.memory / chip.devices, {}
    for hardware in layouts(spec, given, len(found)):
        mesh = devices.mesh(hardware, found)
        try:
            layout.check(spec, hardware, mesh)
        except Refusal:
            continue
        bytes = fit.held(spec, hardware, mesh, backend).total
        if bytes <= fit.USABLE * memory:
            known[hardware] = Candidate(hardware, bytes, seconds(spec, hardware, mesh, chip))
    return sorted(known.values(), key=lambda one: one.seconds)


def layouts(spec: Spec, given: Hardware, count: int) -> Iterator[Hardware]:
    batch, each = spec.optimizer.batch_size, count // given.tensor
    shares = [given.fsdp] if given.fsdp else [size for size in range(1, each + 1) if each % size == 0]
    micros = [given.micro_batch] if given.micro_batch else [batch // parts for parts in MICRO if batch % parts == 0]
    remats = fit.CHOICES if given.remat in ('none', 'auto') else (given.remat,)
    for fsdp, micro, remat in itertools.product(shares, micros, remats):
        if not given.data or given.data * fsdp == each:
            data = each // fsdp
            yield dataclasses.replace(given, data=data, fsdp=fsdp, micro_batch=micro, remat=remat)


def seconds(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, chip: Chip) -> float:
    """Products, and those made again, at the peak; or what travels, where that takes longer."""
    forward = flops.forward(spec.model, spec.data.length)
    tokens = spec.optimizer.batch_size * spec.data.length / mesh.size
    computed = tokens * (flops.TRAINED * forward.total + again(spec, hardware.remat)) / (chip.peak / chip.devices)
    return max(computed, sent(spec, hardware, mesh) / (chip.links / chip.devices))


def again(spec: Spec, remat: str) -> float:
    """Operations of a token's forward pass that its backward pass makes again."""
    one, model = flops.forward(spec.model, spec.data.length), spec.model
    outward = 2 * model.layers * model.width * model.ffn_width  # of the FFN; never made again, but for full
    parts = {'attention': one.attention, 'qkv': 0.75 * one.projections, 'middle': 0.25 * one.projections}
    parts['ffn'] = one.ffn - outward
    kept = set(parts) if remat == 'none' else set(remat.split(','))
    return sum(part for name, part in parts.items() if name not in kept)


def sent(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh) -> float:
    """Bytes that a device sends a step: along fsdp parameters twice, rounded, and gradients once; then along data."""
    size = state.size(state.shapes(spec)['params']) / mesh.shape['tensor']
    parts = spec.optimizer.batch_size // most_sequences(spec, hardware)
    rounded = 0.5 if spec.model.dtype == 'bfloat16' else 1.0
    fsdp, data = mesh.shape['fsdp'], mesh.shape['data']
    return parts * size * (2 * rounded + 1) * (fsdp - 1) / fsdp + 2 * size / fsdp * (data - 1) / data
