"""What a run would take of devices that are not here: its programs compiled for them, and what those say."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from sinklab import devices
from sinklab.chips import Chip
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import fit, layout, memory, programs, state
from sinklab.train.estimate import Compiled, compiled, crossed, estimate
from sinklab.train.step import choice_for


@dataclasses.dataclass(frozen=True)
class Preview:
    """The programs of a run, compiled for a mesh of chips."""

    hardware: Hardware
    mesh: jax.sharding.Mesh
    chip: Chip
    backend: str
    programs: dict[str, Compiled]

    @property
    def memory(self) -> float:
        return self.chip.memory / self.chip.devices

    @property
    def peak(self) -> int:
        return max(one.bytes['peak'] for one in self.programs.values())


def preview(
    spec: Spec,
    hardware: Hardware,
    found: Sequence[jax.Device],
    chip: Chip,
    names: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Preview:
    """All programs, or those of some names. Raises Refusal where one does not fit, or cannot be laid on the chips."""
    mesh = devices.mesh(hardware, found)
    layout.check(spec, hardware, mesh)
    backend = choice_for(spec, hardware, platform(found)).backend
    remat = fit.chosen(spec, hardware, mesh, backend, chip.memory / chip.devices)
    hardware = dataclasses.replace(hardware, remat=remat)
    done = {}
    with jax.set_mesh(mesh):
        lowers = programs.programs(spec, hardware, mesh, backend)
        for name in known(names, [*lowers]):
            say(f'compiling the program {name} for {mesh.size} devices, which may take minutes')
            with fit.fitting(f'the program {name}', (spec, hardware, mesh, backend)):
                done[name] = compiled(lowers[name], platform(found), beside(name, spec, mesh))
    return Preview(hardware, mesh, chip, backend, done)


def beside(name: str, spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """Bytes that lie on a device while a program runs in training, and that it is not given: moments."""
    given_all = ('state', 'step')
    return 0 if name in given_all else memory.of_a_device(state.abstract(spec, mesh)['opt_state'])


def platform(found: Sequence[jax.Device]) -> str:
    """As jax calls the backend of such devices."""
    return {'cuda': 'gpu'}.get(found[0].platform, found[0].platform)


def known(names: Sequence[str], programs: list[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in programs]:
        raise Refusal(f'--programs: {unknown[0]} is unknown; give some of {", ".join(programs)}')
    return names or programs


def document(spec: Spec, one: Preview) -> dict:
    """All of it as JSON has it."""
    return dict(
        devices=one.mesh.size,
        mesh=dict(one.mesh.shape),
        crosses=devices.crossings(one.mesh),
        attention=one.backend,
        batch_size=spec.optimizer.batch_size,
        micro_batch=one.hardware.sequences(spec.optimizer.batch_size),
        remat=one.hardware.remat,
        peak_bytes_per_chip=one.peak,
        memory_bytes_per_chip=one.memory,
        fits=one.peak <= one.memory,
        programs={name: of_program(program, one.mesh) for name, program in one.programs.items()},
        estimate=of_step(spec, one) if 'step' in one.programs else None,
    )


def of_step(spec: Spec, one: Preview) -> dict:
    bound = estimate(spec, one.hardware, one.programs['step'], one.mesh, one.chip)
    return dataclasses.asdict(bound) | dict(seconds=bound.seconds, mfu=bound.mfu, limit=bound.limit)


def of_program(one: Compiled, mesh: jax.sharding.Mesh) -> dict:
    collectives = [
        dict(
            kind=each.kind,
            types=list(each.types),
            axis=crossed(each, mesh),
            bytes=each.bytes,
            times=each.times,
            sent=round(each.sent),
            asynchronous=each.asynchronous,
            origin=each.origin,
        )
        for each in one.program.collectives()
    ]
    buffers = [dict(bytes=size, type=type, origin=origin) for size, type, origin in one.program.buffers()]
    return dict(seconds=round(one.seconds, 1), bytes=one.bytes, collectives=collectives, buffers=buffers)
