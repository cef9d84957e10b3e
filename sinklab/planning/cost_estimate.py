"""Memory and step-time estimates from compiled programs."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sinklab.chip_specs import ChipSpec
from sinklab.config.spec import Hardware, Spec
from sinklab.model import flops
from sinklab.planning.hlo import Collective, HloProgram

KERNEL_PREFIX = 'sinklab_'  # in the names of our kernels, for which the compiler estimates no cycles
# The compiler reports neither text nor cycles of operations on SparseCores (gathers of table rows, on v5p).
ANALYSIS_COMPILER_OPTIONS = {'tpu': {'xla_tpu_offload_gather_to_sparsecore': False}}


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, with its memory use on each device."""

    program: HloProgram
    memory_bytes: dict[str, int]  # argument, output, alias, temp, code, beside (other arrays), peak
    compile_seconds: float  # including lowering


def compile_program(lower: Any, platform: str, resident_bytes: int = 0) -> CompiledProgram:
    start_time = time.perf_counter()
    executable = lower().compile(ANALYSIS_COMPILER_OPTIONS.get(platform))
    memory_analysis = executable.memory_analysis()
    memory_bytes = {
        name: getattr(memory_analysis, f'{name}_size_in_bytes') for name in ('argument', 'output', 'alias', 'temp')
    }
    memory_bytes |= dict(code=memory_analysis.generated_code_size_in_bytes, beside=resident_bytes)
    peak_bytes = sum(memory_bytes.values()) - 2 * memory_bytes['alias']
    return CompiledProgram(
        HloProgram(executable.as_text()), memory_bytes | dict(peak=peak_bytes), time.perf_counter() - start_time
    )


@dataclasses.dataclass(frozen=True)
class StepTimeEstimate:
    """A lower bound of the seconds of a step, from published chip specs and the compiler's cycle counts."""

    products: float  # matrix products of the model, at peak FLOP/s
    again: float  # matrix products that the backward pass repeats
    compiler: float | None  # the compiler's estimate of everything except kernels
    kernels: float  # attention kernels, at peak FLOP/s
    waited: float  # synchronous collectives within a slice, without concurrent computation
    hidden: float  # asynchronous collectives within a slice

    @property
    def compute_seconds(self) -> float:
        min_seconds = self.products + self.again
        return min_seconds if self.compiler is None else max(min_seconds, self.compiler + self.kernels)

    @property
    def seconds(self) -> float:
        return self.waited + max(self.compute_seconds, self.hidden)

    @property
    def mfu(self) -> float:
        return self.products / self.seconds

    @property
    def limit(self) -> str:
        """The overhead that takes most of the time beyond matrix products."""
        overheads = {
            'collectives that are waited for': self.waited,
            'collectives beside the computation': max(0.0, self.hidden - self.compute_seconds),
            'what is computed beside the products, and again': self.compute_seconds - self.products,
        }
        return max(overheads, key=overheads.__getitem__)


def estimate_step_time(
    spec: Spec, hardware: Hardware, step: CompiledProgram, mesh: jax.sharding.Mesh, chip: ChipSpec
) -> StepTimeEstimate:
    """Estimate the time of one train step on a mesh of chips."""
    peak_flops, link_bytes = (
        chip.flops_per_second / chip.devices_per_chip,
        chip.link_bytes_per_second / chip.devices_per_chip,
    )
    forward_flops = flops.count_forward_flops(spec.model, spec.data.length)
    tokens_per_device = spec.optimizer.batch_size * spec.data.length / mesh.size
    # Kernels have two products forward (queries times keys, weights times values), and five backward, where the
    # formula counts four.
    kernel_runs, batch_size = step.program.count_kernels(KERNEL_PREFIX), spec.optimizer.batch_size
    attention_flops = (
        tokens_per_device
        * hardware.get_micro_batch_size(batch_size)
        / batch_size
        * forward_flops.attention
        / spec.model.layers
    )
    kernel_flops = attention_flops * sum(
        times * (2.5 if 'backward' in name else 1) for name, times in kernel_runs.items()
    )
    collectives = [collective for collective in step.program.find_collectives() if is_within_slice(collective, mesh)]
    transfers = [
        (collective.is_async, collective.sent_bytes / compute_link_fraction(collective, mesh) / link_bytes)
        for collective in collectives
    ]
    return StepTimeEstimate(
        products=flops.TRAINING_FLOPS_FACTOR * tokens_per_device * forward_flops.total / peak_flops,
        again=tokens_per_device
        * flops.count_recompute_flops(spec.model, spec.data.length, hardware.remat)
        / peak_flops,
        compiler=step.program.estimate_cycles() / chip.clock_hz if chip.clock_hz else None,
        kernels=kernel_flops / peak_flops,
        waited=sum(seconds for is_async, seconds in transfers if not is_async),
        hidden=sum(seconds for is_async, seconds in transfers if is_async),
    )


def compute_link_fraction(collective: Collective, mesh: jax.sharding.Mesh) -> float:
    """Compute the fraction of a chip's links that a collective uses, from the directions of a torus."""
    chips = mesh.devices.flatten()
    group_chips = [chips[index] for index in collective.replica_groups[0]]
    return max(1, count_directions(group_chips)) / max(1, count_directions(chips))


def is_within_slice(collective: Collective, mesh: jax.sharding.Mesh) -> bool:
    """Return whether a collective stays within a slice; no bandwidth between slices is published."""
    return len({getattr(mesh.devices.flat[index], 'slice_index', 0) for index in collective.replica_groups[0]}) == 1


def count_directions(chips: Sequence[jax.Device]) -> int:
    """Count the coordinates in which devices differ; 0 if the network is a switch."""
    return sum(
        len(set(coordinates)) > 1
        for coordinates in zip(*(getattr(chip, 'coords', ()) for chip in chips), strict=True)
    )


def find_crossed_axes(collective: Collective, mesh: jax.sharding.Mesh) -> str:
    """Return the mesh axes that a collective crosses."""
    coordinate_AN = np.array(np.unravel_index(collective.replica_groups[0], mesh.devices.shape))
    return ','.join(
        axis for axis, coordinates in zip(mesh.axis_names, coordinate_AN, strict=True) if len(set(coordinates)) > 1
    )
