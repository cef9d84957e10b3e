"""A fork: a run that goes on from a step of another one, by another config; what it takes along and what not."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests
from sinklab.checkpoint.checkpoints import Checkpoints
from sinklab.checkpoint.orbax import HEALTHY, quiet, reason
from sinklab.folder import Folder, differences, flat
from sinklab.record import Refusal
from sinklab.spec import Spec
from sinklab.train import state

KEPT = ('optimizer.name', 'data.task')  # what says of what kind the numbers of a state are
READING = ('data.', 'optimizer.batch_size ')  # what says which tokens a step reads


@dataclasses.dataclass(frozen=True)
class Origin:
    """A checkpoint that a fork comes from."""

    folder: Folder
    step: int
    spec: Spec

    def __str__(self) -> str:
        return f'--from={self.folder}@{self.step}'


def check(origin: Origin, spec: Spec) -> None:
    """Refuses what cannot be carried over, before any data is read."""
    if (steps := spec.optimizer.steps) <= origin.step:
        raise Refusal(f'{origin} leaves nothing to train of config.optimizer.steps={steps}; give more of them')
    if fault := digests.fault(origin.folder, origin.step):
        raise Refusal(f'{path(origin)} is not sound: {fault.why}; give another step, see sinklab checkpoint ls')
    theirs, ours = fields(origin.spec), fields(spec)
    for name in KEPT:
        if theirs[name] != ours[name]:
            raise Refusal(f'config.{name} is {theirs[name]} in {origin} and {ours[name]} here; a fork keeps it')
    before, now = parameters(origin.spec), parameters(spec)
    for name in before:
        if now.get(name, before[name]) != before[name]:
            raise Refusal(
                f'{name} has the shape {before[name]} in {origin} and {now[name]} here '
                f'({"; ".join(differences(theirs, ours))}); what a fork carries over keeps its shape'
            )


def lineage(origin: Origin, spec: Spec, folder: Folder, data: dict[str, str | int]) -> dict:
    """What row.json says of a fork in a folder that reads this data."""
    changes, before, now = differences(fields(origin.spec), fields(spec)), parameters(origin.spec), parameters(spec)
    return dict(
        run=os.path.relpath(origin.folder.path, folder.path),
        step=origin.step,
        row=origin.folder.read('row').get('row') or origin.folder.path.name,
        commit=origin.folder.environment().get('commit'),
        config=changes,
        new=[name for name in now if name not in before],
        dropped=[name for name in before if name not in now],
        data=other_data(origin, changes, data),
    )


def other_data(origin: Origin, changes: list[str], data: dict[str, str | int]) -> list[str]:
    """In what the data of a fork is not that of its origin, as it may be where the changes of the config say so."""
    with one_line(origin):
        before = dict(ocp.checkpointables_metadata(path(origin)).custom_metadata['data'])
    differ = differences(before, data)
    if before.get('tokenizer') != data.get('tokenizer'):
        raise Refusal(f'{origin} has another tokenizer ({"; ".join(differ)}); its ids are not those of this data')
    if differ and not any(change.startswith(READING) for change in changes):
        raise Refusal(f'{origin} was trained on other data ({"; ".join(differ)}); bring the old ones back')
    return differ


def begin(origin: Origin | None, spec: Spec, mesh: jax.sharding.Mesh, folder: Folder, saved: Checkpoints) -> None:
    """Gives a fork a first checkpoint of its own; from there on it needs its origin no more."""
    if not folder.start() or saved.latest() is not None:
        return
    if origin is None:
        known = folder.lineage()
        raise Refusal(
            f'{folder} has no checkpoint and begins at step {known["step"]} of {known["run"]}; give --from again'
        )
    saved.save(origin.step, carried(origin, spec, mesh))
    saved.wait()


def carried(origin: Origin, spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """The origin's state as a state of this spec: by path, and what is new as in a fresh run."""
    with one_line(origin):
        before = leaves(ocp.load(path(origin), state.abstract(origin.spec, mesh), checkpointable_name='state'))
    wanted = state.abstract(spec, mesh)
    new = {name: leaf.sharding for name, leaf in leaves(wanted).items() if name not in before}
    found = before | fresh(spec, mesh, new)
    return jax.tree_util.tree_map_with_path(lambda at, _: found[jax.tree_util.keystr(at)], wanted)


def fresh(spec: Spec, mesh: jax.sharding.Mesh, new: dict[str, jax.sharding.NamedSharding]) -> dict[str, jax.Array]:
    """Leaves of a fresh state, by path."""
    if not new:
        return {}

    def made() -> dict:
        initial = leaves(state.initial(spec))
        return {name: initial[name] for name in new}

    options = state.ONCE.get(mesh.devices.flat[0].platform)
    return jax.jit(made, out_shardings=new, compiler_options=options)()


def leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(at): leaf for at, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def fields(spec: Spec) -> dict[str, Any]:
    return flat(dataclasses.asdict(spec))


def parameters(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by its name."""
    found = jax.tree_util.tree_leaves_with_path(state.shapes(spec)['params'])
    return {'.'.join(map(str, state.names(at))): leaf.shape for at, leaf in found}


def path(origin: Origin) -> os.PathLike:
    return (origin.folder.checkpoints / str(origin.step)).absolute()


@contextlib.contextmanager
def one_line(origin: Origin) -> Iterator[None]:
    try:
        with quiet():
            yield
    except HEALTHY:
        raise
    except Exception as error:  # of any kind: what a damaged file raises depends on where it is damaged
        others = [step for step in origin.folder.checkpoint_steps() if step != origin.step]
        raise Refusal(
            f'{path(origin)} cannot be restored ({reason(error)}); give another step of {origin.folder}'
            f'{f" ({others})" if others else ""}'
        ) from error
