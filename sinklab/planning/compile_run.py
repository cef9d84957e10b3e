"""Compilation of a run for absent devices, and the memory of its programs."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sinklab.chip_specs import ChipSpec
from sinklab.config.spec import Layout, Spec
from sinklab.model import flops
from sinklab.parallel import device_mesh, sharding
from sinklab.train import device_layout, sink_probe, state, step, validation_loss

# libtpu reports neither text nor cycles of operations on SparseCores (gathers of table rows, on v5p), which
# benchmarks/step_cost.py reads.
COMPILER_OPTIONS = {'tpu': {'xla_tpu_offload_gather_to_sparsecore': False}}

LowerFn = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, with the bytes of a device that it needs."""

    executable: jax.stages.Compiled
    peak_bytes: int  # with arrays that stay on the device and that the program does not use
    compile_seconds: float  # including lowering


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """The programs of a run, compiled for a mesh of chips."""

    layout: Layout
    mesh: jax.sharding.Mesh
    chip: ChipSpec
    backend: str
    programs: dict[str, CompiledProgram]

    @property
    def device_memory_bytes(self) -> float:
        return self.chip.memory_bytes / self.chip.devices_per_chip

    @property
    def peak_bytes(self) -> int:
        return max(program.peak_bytes for program in self.programs.values())


def compile_run(
    spec: Spec,
    layout: Layout,
    target_devices: Sequence[jax.Device],
    chip: ChipSpec,
    program_names: Sequence[str] = (),
    print_line: Callable[[str], None] = lambda text: None,
) -> CompiledRun:
    """Compile the programs of a run, or those with the given names.

    Raises:
        UserError: A program does not fit on the chips, or cannot be divided over them.
    """
    platform = {'cuda': 'gpu'}.get(target_devices[0].platform, target_devices[0].platform)
    mesh = device_mesh.make_mesh(layout, target_devices)
    device_layout.check_layout(spec, layout, mesh)
    layout = dataclasses.replace(layout, micro_batch=device_layout.choose_micro_batch(spec, layout, mesh))
    backend = step.choose_backend(spec, layout, platform).backend
    memory_bytes = chip.memory_bytes / chip.devices_per_chip
    remat = device_layout.choose_remat_policy(spec, layout, mesh, backend, memory_bytes)
    layout = dataclasses.replace(layout, remat=remat)
    compiled_programs = {}
    with jax.set_mesh(mesh):
        lower_functions = get_programs(spec, layout, mesh, backend)
        moment_bytes = count_device_bytes(state.make_abstract_state(spec, mesh)['opt_state'])
        for name in program_names or lower_functions:
            print_line(f'compiling the program {name} for {mesh.size} devices, which may take minutes')
            with device_layout.translate_oom_errors():
                compiled_programs[name] = compile_program(
                    lower_functions[name], platform, 0 if name in ('state', 'step') else moment_bytes
                )
    return CompiledRun(layout, mesh, chip, backend, compiled_programs)


def get_programs(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str) -> dict[str, LowerFn]:
    """Return {name: lower()} in the order in which a run uses them; call lower() under the mesh."""
    abstract_state = state.make_abstract_state(spec, mesh)
    num_shards = sharding.count_batch_shards(mesh)
    _, valid_rows = validation_loss.choose_eval_batch_sizes(
        spec.valid.windows, layout.get_micro_batch_size(spec.optimizer.batch_size), num_shards
    )
    _, probe_rows = validation_loss.choose_eval_batch_sizes(spec.probe.sequences, spec.probe.sequences, num_shards)

    # With trigger tokens, a run computes the loss of each token.
    make_valid_loss = validation_loss.make_token_loss if spec.data.triggers else validation_loss.make_mean_loss

    def make_abstract_ids(count: int, length: int) -> jax.ShapeDtypeStruct:
        ids_sharding = sharding.make_batch_sharding(mesh, (count, length))
        return jax.ShapeDtypeStruct((count, length), jnp.int32, sharding=ids_sharding)

    return {
        'state': lambda: state.jit_create_state(spec, mesh).lower(),
        'validation': lambda: make_valid_loss(spec, mesh, backend).lower(
            abstract_state['params'], make_abstract_ids(valid_rows, spec.data.length + 1)
        ),
        'probe': lambda: sink_probe.jit_probe(spec, mesh).lower(
            abstract_state['params'], make_abstract_ids(probe_rows, spec.probe.length)
        ),
        'step': lambda: step.make_train_step(spec, layout, mesh, backend).lower(
            abstract_state, *step.make_abstract_inputs(spec, mesh)
        ),
    }


def compile_program(lower: LowerFn, platform: str, resident_bytes: int) -> CompiledProgram:
    start_time = time.perf_counter()
    executable = lower().compile(COMPILER_OPTIONS.get(platform))
    peak_bytes = device_layout.count_peak_bytes(executable) + resident_bytes
    return CompiledProgram(executable, peak_bytes, time.perf_counter() - start_time)


def count_device_bytes(tree: dict) -> int:
    """Return the bytes of a tree of abstract arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def make_report(spec: Spec, compiled_run: CompiledRun) -> dict:
    """Make the report of a compiled run, for JSON output."""
    layout, mesh, chip = compiled_run.layout, compiled_run.mesh, compiled_run.chip
    # The compiler's cost_analysis() counts the body of a loop once, and kernels not at all.
    step_flops = flops.count_step_flops(spec) / mesh.size
    return dict(
        devices=mesh.size,
        mesh=dict(mesh.shape),
        attention=compiled_run.backend,
        batch_size=spec.optimizer.batch_size,
        micro_batch=layout.get_micro_batch_size(spec.optimizer.batch_size),
        remat=layout.remat,
        peak_bytes_per_chip=compiled_run.peak_bytes,
        memory_bytes_per_chip=compiled_run.device_memory_bytes,
        fits=compiled_run.peak_bytes <= compiled_run.device_memory_bytes,
        step_flops_per_chip=step_flops,
        step_seconds_at_peak=step_flops / (chip.flops_per_second / chip.devices_per_chip),
        programs={
            name: dict(seconds=round(program.compile_seconds, 1), peak_bytes=program.peak_bytes)
            for name, program in compiled_run.programs.items()
        },
    )
