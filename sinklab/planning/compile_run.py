"""Compilation of a run for absent devices, and the memory of its programs."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sinklab.chip_specs import ChipSpec
from sinklab.config.spec import Layout, Spec
from sinklab.model import flops
from sinklab.parallel import device_mesh, sharding
from sinklab.train import memory_estimate, sink_probe, state, step, validation_loss

# libtpu reports neither text nor cycles of operations on SparseCores (gathers of table rows, on v5p), which
# benchmarks/step_cost.py reads.
COMPILER_OPTIONS = {'tpu': {'xla_tpu_offload_gather_to_sparsecore': False}}

LowerFn = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, with its memory use on each device."""

    executable: jax.stages.Compiled
    # argument, output, alias, temp, code, resident (arrays that the program does not use) and peak
    memory_bytes: dict[str, int]
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
    def memory_bytes(self) -> float:
        return self.chip.memory_bytes / self.chip.devices_per_chip

    @property
    def peak_bytes(self) -> int:
        return max(program.memory_bytes['peak'] for program in self.programs.values())


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
    memory_estimate.check_layout(spec, layout, mesh)
    layout = dataclasses.replace(layout, micro_batch=memory_estimate.choose_micro_batch(spec, layout, mesh))
    backend = step.choose_unverified_backend(spec, layout, platform).backend
    memory_bytes = chip.memory_bytes / chip.devices_per_chip
    remat = memory_estimate.choose_remat_policy(spec, layout, mesh, backend, memory_bytes)
    layout = dataclasses.replace(layout, remat=remat)
    compiled_programs = {}
    with jax.set_mesh(mesh):
        lower_functions = get_programs(spec, layout, mesh, backend)
        for name in program_names or lower_functions:
            print_line(f'compiling the program {name} for {mesh.size} devices, which may take minutes')
            with memory_estimate.translate_oom_errors(f'the program {name}'):
                compiled_programs[name] = compile_program(
                    lower_functions[name], platform, count_resident_bytes(name, spec, mesh)
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
    compile_seconds = time.perf_counter() - start_time
    analysis = executable.memory_analysis()
    memory_bytes = dict(
        argument=analysis.argument_size_in_bytes,
        output=analysis.output_size_in_bytes,
        alias=analysis.alias_size_in_bytes,
        temp=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        resident=resident_bytes,
    )
    # Aliased outputs reuse the memory of arguments.
    memory_bytes['peak'] = sum(memory_bytes.values()) - 2 * memory_bytes['alias']
    return CompiledProgram(executable, memory_bytes, compile_seconds)


def count_resident_bytes(name: str, spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """Count the bytes of the optimizer state, which stays on a device during programs that do not use it."""
    if name in ('state', 'step'):
        return 0
    return memory_estimate.count_device_bytes(state.make_abstract_state(spec, mesh)['opt_state'])


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
        memory_bytes_per_chip=compiled_run.memory_bytes,
        fits=compiled_run.peak_bytes <= compiled_run.memory_bytes,
        step_flops_per_chip=step_flops,
        step_seconds_at_peak=step_flops / (chip.flops_per_second / chip.devices_per_chip),
        programs={
            name: dict(seconds=round(program.compile_seconds, 1), bytes=program.memory_bytes)
            for name, program in compiled_run.programs.items()
        },
    )
