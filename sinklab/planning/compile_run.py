"""Compilation of the train step of a run for absent devices, and its memory."""

import dataclasses
import time
from collections.abc import Sequence

import jax

from sinklab.chip_specs import ChipSpec
from sinklab.config.spec import Layout, Spec
from sinklab.model import flops
from sinklab.parallel import device_mesh
from sinklab.train import device_layout, step

# libtpu reports neither text nor cycles of operations on SparseCores (gathers of table rows, on v5p), which
# benchmarks/step_cost.py reads.
COMPILER_OPTIONS = {'tpu': {'xla_tpu_offload_gather_to_sparsecore': False}}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The train step of a run, compiled for a mesh of chips."""

    layout: Layout
    mesh: jax.sharding.Mesh
    chip: ChipSpec
    backend: str
    executable: jax.stages.Compiled
    compile_seconds: float  # including lowering

    @property
    def device_memory_bytes(self) -> float:
        return self.chip.memory_bytes / self.chip.devices_per_chip

    @property
    def peak_bytes(self) -> int:
        """The bytes of a device that the step needs."""
        return device_layout.count_peak_bytes(self.executable)


def compile_run(spec: Spec, layout: Layout, target_devices: Sequence[jax.Device], chip: ChipSpec) -> CompiledStep:
    """Compile the train step of a run.

    Raises:
        UserError: The step does not fit on the chips, or cannot be divided over them.
    """
    platform = {'cuda': 'gpu'}.get(target_devices[0].platform, target_devices[0].platform)
    mesh = device_mesh.make_mesh(layout, target_devices)
    memory_bytes = chip.memory_bytes / chip.devices_per_chip
    layout, backend_choice = device_layout.choose_layout(spec, layout, mesh, memory_bytes, platform)
    backend = backend_choice.backend
    start_time = time.perf_counter()
    with jax.set_mesh(mesh), device_layout.translate_oom_errors():
        executable = step.compile_train_step(spec, layout, mesh, backend, COMPILER_OPTIONS.get(platform))
    return CompiledStep(layout, mesh, chip, backend, executable, time.perf_counter() - start_time)


def make_report(spec: Spec, compiled_step: CompiledStep) -> dict:
    """Make the report of a compiled step, for JSON output."""
    layout = compiled_step.layout
    mesh = compiled_step.mesh
    chip = compiled_step.chip
    # The compiler's cost_analysis() counts the body of a loop once, and kernels not at all.
    step_flops = flops.count_step_flops(spec) / mesh.size
    return dict(
        devices=mesh.size,
        mesh=dict(mesh.shape),
        attention=compiled_step.backend,
        batch_size=spec.optimizer.batch_size,
        micro_batch=layout.get_micro_batch_size(spec.optimizer.batch_size),
        remat=layout.remat,
        compile_seconds=round(compiled_step.compile_seconds, 1),
        peak_bytes_per_chip=compiled_step.peak_bytes,
        memory_bytes_per_chip=compiled_step.device_memory_bytes,
        fits=compiled_step.peak_bytes <= compiled_step.device_memory_bytes,
        step_flops_per_chip=step_flops,
        step_seconds_at_peak=step_flops / (chip.flops_per_second / chip.devices_per_chip),
    )
