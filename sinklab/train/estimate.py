"""What compiled programs would cost on chips that are not here: read from the compiler's text, and by formula."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sinklab.chips import Chip
from sinklab.hlo import Collective, Program
from sinklab.model import flops
from sinklab.spec import Hardware, Spec

KERNEL = 'sinklab_'  # in the names of ours, of which the compiler says no cycles
# Of what it gives to SparseCores (rows of a table, on v5p) the compiler tells neither text nor cycles.
READABLE = {'tpu': {'xla_tpu_offload_gather_to_sparsecore': False}}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as the compiler has left it, for each of the devices that it is laid on."""

    program: Program
    bytes: dict[str, int]  # arguments, output, temporary, code, what lies beside them, and peak of all
    seconds: float  # to lower and compile


def compiled(lower: Any, platform: str, beside: int = 0) -> Compiled:
    begun = time.perf_counter()
    found = lower().compile(READABLE.get(platform))
    memory = found.memory_analysis()
    bytes = {name: getattr(memory, f'{name}_size_in_bytes') for name in ('argument', 'output', 'alias', 'temp')}
    bytes |= dict(code=memory.generated_code_size_in_bytes, beside=beside)
    peak = sum(bytes.values()) - 2 * bytes['alias']
    return Compiled(Program(found.as_text()), bytes | dict(peak=peak), time.perf_counter() - begun)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step, at least: by what is published of the chip and the compiler's own count of cycles."""

    products: float  # of the FLOPs that the model wants, at the peak
    again: float  # of those that the backward pass makes again
    compiler: float | None  # what the compiler estimates of all but kernels
    kernels: float  # of attention, at the peak
    waited: float  # collectives within a slice that nothing is computed beside
    hidden: float  # the others

    @property
    def computed(self) -> float:
        least = self.products + self.again
        return least if self.compiler is None else max(least, self.compiler + self.kernels)

    @property
    def seconds(self) -> float:
        return self.waited + max(self.computed, self.hidden)

    @property
    def mfu(self) -> float:
        return self.products / self.seconds

    @property
    def limit(self) -> str:
        """What most of the time beyond the products goes into."""
        beyond = {
            'collectives that are waited for': self.waited,
            'collectives beside the computation': max(0.0, self.hidden - self.computed),
            'what is computed beside the products, and again': self.computed - self.products,
        }
        return max(beyond, key=beyond.__getitem__)


def estimate(spec: Spec, hardware: Hardware, step: Compiled, mesh: jax.sharding.Mesh, chip: Chip) -> Estimate:
    """Of one update on a mesh of chips."""
    peak, links = chip.peak / chip.devices, chip.links / chip.devices
    forward = flops.forward(spec.model, spec.data.length)
    tokens = spec.optimizer.batch_size * spec.data.length / mesh.size
    # Queries times keys, weights times values, and of their gradients five products where the formula counts four.
    runs, batch = step.program.kernels(KERNEL), spec.optimizer.batch_size
    attention = tokens * hardware.sequences(batch) / batch * forward.attention / spec.model.layers
    kernels = attention * sum(times * (2.5 if 'backward' in name else 1) for name, times in runs.items())
    found = [one for one in step.program.collectives() if within(one, mesh)]
    sent = [(one.asynchronous, one.sent / share(one, mesh) / links) for one in found]
    return Estimate(
        products=flops.TRAINED * tokens * forward.total / peak,
        again=tokens * flops.again(spec.model, spec.data.length, hardware.remat) / peak,
        compiler=step.program.cycles() / chip.clock if chip.clock else None,
        kernels=kernels / peak,
        waited=sum(seconds for beside, seconds in sent if not beside),
        hidden=sum(seconds for beside, seconds in sent if beside),
    )


def share(one: Collective, mesh: jax.sharding.Mesh) -> float:
    """Of a chip's links, those that a collective goes along: of a torus, by the directions that its group has."""
    chips = mesh.devices.flatten()
    among = [chips[index] for index in one.groups[0]]
    return max(1, directions(among)) / max(1, directions(chips))


def within(one: Collective, mesh: jax.sharding.Mesh) -> bool:
    """If a collective stays within a slice; of the network between slices nothing is published by chip."""
    return len({getattr(mesh.devices.flat[index], 'slice_index', 0) for index in one.groups[0]}) == 1


def directions(chips: Sequence[jax.Device]) -> int:
    """In how many coordinates some devices differ; none where the network is a switch."""
    return sum(len(set(along)) > 1 for along in zip(*(getattr(chip, 'coords', ()) for chip in chips), strict=True))


def crossed(one: Collective, mesh: jax.sharding.Mesh) -> str:
    """The axes of the mesh that a collective goes along."""
    places_AN = np.array(np.unravel_index(one.groups[0], mesh.devices.shape))
    return ','.join(axis for axis, found in zip(mesh.axis_names, places_AN, strict=True) if len(set(found)) > 1)
