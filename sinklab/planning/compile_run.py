"""Compilation of a run for absent devices, and estimates of its memory and step time."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.chip_specs import ChipSpec
from sinklab.config.spec import Hardware, Spec
from sinklab.errors import UserError
from sinklab.model import flops
from sinklab.parallel import device_mesh, sharding
from sinklab.planning.hlo import Collective, HloProgram
from sinklab.train import (
    memory_estimate,
    sink_probe,
    state,
    step,
    validation_loss,
)
from sinklab.train.step import choose_unverified_backend

KERNEL_PREFIX = 'sinklab_'  # in the names of our kernels, for which the compiler estimates no cycles
# The compiler reports neither text nor cycles of operations on SparseCores (gathers of table rows, on v5p).
ANALYSIS_COMPILER_OPTIONS = {'tpu': {'xla_tpu_offload_gather_to_sparsecore': False}}


LowerFn = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, with its memory use on each device."""

    program: HloProgram
    # argument, output, alias, temp, code, resident (arrays that the program does not use) and peak
    memory_bytes: dict[str, int]
    compile_seconds: float  # including lowering


def compile_program(lower: LowerFn, platform: str, resident_bytes: int = 0) -> CompiledProgram:
    """Lower and compile a program, and read its memory analysis.

    Args:
        lower: Function without arguments that lowers the program.
        platform: The platform whose compiler options are used.
        resident_bytes: Memory of arrays that the program does not use.
    """
    start_time = time.perf_counter()
    executable = lower().compile(ANALYSIS_COMPILER_OPTIONS.get(platform))
    memory_analysis = executable.memory_analysis()
    memory_bytes = {
        name: getattr(memory_analysis, f'{name}_size_in_bytes') for name in ('argument', 'output', 'alias', 'temp')
    }
    memory_bytes |= dict(code=memory_analysis.generated_code_size_in_bytes, resident=resident_bytes)
    # Aliased outputs reuse the memory of arguments.
    peak_bytes = sum(memory_bytes.values()) - 2 * memory_bytes['alias']
    return CompiledProgram(
        HloProgram(executable.as_text()), memory_bytes | dict(peak=peak_bytes), time.perf_counter() - start_time
    )


@dataclasses.dataclass(frozen=True)
class StepTimeEstimate:
    """A lower bound of the seconds of a step, from published chip specs and the compiler's cycle counts."""

    matmul_seconds: float  # matrix products of the model, at peak FLOP/s
    recompute_seconds: float  # matrix products that the backward pass repeats
    compiler_seconds: float | None  # the compiler's estimate of everything except kernels
    kernel_seconds: float  # attention kernels, at peak FLOP/s
    synchronous_seconds: float  # synchronous collectives within a slice, without concurrent computation
    overlapped_seconds: float  # asynchronous collectives within a slice

    @property
    def compute_seconds(self) -> float:
        min_seconds = self.matmul_seconds + self.recompute_seconds
        if self.compiler_seconds is None:
            return min_seconds
        return max(min_seconds, self.compiler_seconds + self.kernel_seconds)

    @property
    def seconds(self) -> float:
        return self.synchronous_seconds + max(self.compute_seconds, self.overlapped_seconds)

    @property
    def mfu(self) -> float:
        return self.matmul_seconds / self.seconds

    @property
    def limit(self) -> str:
        """The overhead that takes most of the time beyond matrix products."""
        overheads = {
            'synchronous collectives': self.synchronous_seconds,
            'collectives longer than the computation that they overlap with': max(
                0.0, self.overlapped_seconds - self.compute_seconds
            ),
            'operations other than matrix products, and recomputation': self.compute_seconds - self.matmul_seconds,
        }
        return max(overheads, key=overheads.__getitem__)


def count_kernel_passes(program: HloProgram) -> float:
    """Return the work of the attention kernels in units of one forward kernel, which has two matrix products.

    A kernel with `backward` in its name counts as five products, as that for TPUs has.
    """
    kernel_runs = program.count_kernels(KERNEL_PREFIX)
    return sum(times * (2.5 if 'backward' in name else 1) for name, times in kernel_runs.items())


def estimate_step_time(
    spec: Spec,
    hardware: Hardware,
    step: CompiledProgram,
    mesh: jax.sharding.Mesh,
    chip: ChipSpec,
    kernel_passes: float | None = None,
) -> StepTimeEstimate:
    """Estimate the time of one train step on a mesh of chips.

    Args:
        spec: Config of the run.
        hardware: Layout of the run.
        step: Compiled train step.
        mesh: Mesh of the devices.
        chip: Published figures of the chip.
        kernel_passes: Forward passes of attention with as many matrix products as its kernels; None to count our
            kernels.
    """
    peak_flops, link_bytes = (
        chip.flops_per_second / chip.devices_per_chip,
        chip.link_bytes_per_second / chip.devices_per_chip,
    )
    forward_flops = flops.count_forward_flops(spec.model, spec.data.length)
    tokens_per_device = spec.optimizer.batch_size * spec.data.length / mesh.size
    batch_size = spec.optimizer.batch_size
    kernel_passes = count_kernel_passes(step.program) if kernel_passes is None else kernel_passes
    attention_flops = (
        tokens_per_device
        * hardware.get_micro_batch_size(batch_size)
        / batch_size
        * forward_flops.attention
        / spec.model.layers
    )
    collectives = [collective for collective in step.program.find_collectives() if is_within_slice(collective, mesh)]
    transfers = [
        (collective.is_async, collective.sent_bytes / compute_link_fraction(collective, mesh) / link_bytes)
        for collective in collectives
    ]
    return StepTimeEstimate(
        matmul_seconds=flops.TRAINING_FLOPS_FACTOR * tokens_per_device * forward_flops.total / peak_flops,
        recompute_seconds=tokens_per_device
        * flops.count_recompute_flops(spec.model, spec.data.length, hardware.remat)
        / peak_flops,
        compiler_seconds=step.program.estimate_cycles() / chip.clock_hz if chip.clock_hz else None,
        kernel_seconds=kernel_passes * attention_flops / peak_flops,
        synchronous_seconds=sum(seconds for is_async, seconds in transfers if not is_async),
        overlapped_seconds=sum(seconds for is_async, seconds in transfers if is_async),
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


def get_programs(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> dict[str, LowerFn]:
    """Return {name: lower()} in the order in which a run uses them; call lower() under the mesh."""
    abstract_state = state.make_abstract_state(spec, mesh)
    num_shards = sharding.count_batch_shards(mesh)
    _, valid_rows = validation_loss.choose_eval_batch_sizes(
        spec.valid.windows, hardware.get_micro_batch_size(spec.optimizer.batch_size), num_shards
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
        'step': lambda: step.make_train_step(spec, hardware, mesh, backend).lower(
            abstract_state, *step.make_abstract_inputs(spec, mesh)
        ),
    }


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """The programs of a run, compiled for a mesh of chips."""

    hardware: Hardware
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
    hardware: Hardware,
    target_devices: Sequence[jax.Device],
    chip: ChipSpec,
    program_names: Sequence[str] = (),
    print_line: Callable[[str], None] = lambda text: None,
) -> CompiledRun:
    """Compile the programs of a run, or those with the given names.

    Raises:
        UserError: A program does not fit on the chips, or cannot be divided over them.
    """
    mesh = device_mesh.make_mesh(hardware, target_devices)
    memory_estimate.check_layout(spec, hardware, mesh)
    hardware = dataclasses.replace(hardware, micro_batch=memory_estimate.choose_micro_batch(spec, hardware, mesh))
    backend = choose_unverified_backend(spec, hardware, get_platform(target_devices)).backend
    remat = memory_estimate.choose_remat_policy(
        spec, hardware, mesh, backend, chip.memory_bytes / chip.devices_per_chip
    )
    hardware = dataclasses.replace(hardware, remat=remat)
    compiled_programs = {}
    with jax.set_mesh(mesh):
        lowerings = get_programs(spec, hardware, mesh, backend)
        for name in select_programs(program_names, [*lowerings]):
            print_line(f'compiling the program {name} for {mesh.size} devices, which may take minutes')
            with memory_estimate.translate_oom_errors(f'the program {name}', (spec, hardware, mesh, backend)):
                compiled_programs[name] = compile_program(
                    lowerings[name], get_platform(target_devices), count_resident_bytes(name, spec, mesh)
                )
    return CompiledRun(hardware, mesh, chip, backend, compiled_programs)


def count_resident_bytes(name: str, spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """Count the bytes of the optimizer state, which stays on a device during programs that do not use it."""
    programs_with_state = ('state', 'step')
    return (
        0
        if name in programs_with_state
        else memory_estimate.count_device_bytes(state.make_abstract_state(spec, mesh)['opt_state'])
    )


def get_platform(target_devices: Sequence[jax.Device]) -> str:
    """Return the name of the JAX platform of the target devices."""
    return {'cuda': 'gpu'}.get(target_devices[0].platform, target_devices[0].platform)


def select_programs(program_names: Sequence[str], available_names: list[str]) -> Sequence[str]:
    if unknown_names := [name for name in program_names if name not in available_names]:
        raise UserError(f'--programs: {unknown_names[0]} is unknown; give some of {", ".join(available_names)}')
    return program_names or available_names


def make_report(spec: Spec, compiled_run: CompiledRun) -> dict:
    """Make the report of a compiled run, for JSON output."""
    return dict(
        devices=compiled_run.mesh.size,
        mesh=dict(compiled_run.mesh.shape),
        crosses=device_mesh.find_crossed_boundaries(compiled_run.mesh),
        attention=compiled_run.backend,
        batch_size=spec.optimizer.batch_size,
        micro_batch=compiled_run.hardware.get_micro_batch_size(spec.optimizer.batch_size),
        remat=compiled_run.hardware.remat,
        peak_bytes_per_chip=compiled_run.peak_bytes,
        memory_bytes_per_chip=compiled_run.memory_bytes,
        fits=compiled_run.peak_bytes <= compiled_run.memory_bytes,
        programs={
            name: make_program_report(program, compiled_run.mesh) for name, program in compiled_run.programs.items()
        },
        estimate=make_step_report(spec, compiled_run) if 'step' in compiled_run.programs else None,
    )


def make_step_report(spec: Spec, compiled_run: CompiledRun) -> dict:
    step_estimate = estimate_step_time(
        spec, compiled_run.hardware, compiled_run.programs['step'], compiled_run.mesh, compiled_run.chip
    )
    return dataclasses.asdict(step_estimate) | dict(
        seconds=step_estimate.seconds, mfu=step_estimate.mfu, limit=step_estimate.limit
    )


def make_program_report(compiled_program: CompiledProgram, mesh: jax.sharding.Mesh) -> dict:
    collectives = [
        dict(
            kind=collective.kind,
            types=list(collective.types),
            axis=find_crossed_axes(collective, mesh),
            bytes=collective.num_bytes,
            times=collective.num_executions,
            sent=round(collective.sent_bytes),
            asynchronous=collective.is_async,
            origin=collective.op_name,
        )
        for collective in compiled_program.program.find_collectives()
    ]
    buffers = [
        dict(bytes=size, type=array_type, origin=origin)
        for size, array_type, origin in compiled_program.program.find_largest_buffers()
    ]
    return dict(
        seconds=round(compiled_program.compile_seconds, 1),
        bytes=compiled_program.memory_bytes,
        collectives=collectives,
        buffers=buffers,
    )
