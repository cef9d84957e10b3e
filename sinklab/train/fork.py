"""A fork: a run that begins with a checkpoint of another one, by another config; what it takes along and what not."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests, restore
from sinklab.checkpoint.checkpoints import Checkpoints, fault_of
from sinklab.checkpoint.orbax import one_line, reaching
from sinklab.files.place import absolute, relative
from sinklab.files.whole import awaited
from sinklab.folder import Folder, differences, flat, named
from sinklab.group import Group, once, same
from sinklab.record import Refusal
from sinklab.spec import Spec, Takes
from sinklab.train import state

READING = ('data.', 'optimizer.batch_size ')  # what says which tokens a step reads


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a fork takes along of a checkpoint."""

    parts: tuple[str, ...]  # of a state
    kept: tuple[str, ...]  # fields of the config that say of what kind these are
    goes_on: bool  # from the checkpoint's step, in the same data
    words: str  # how the fork begins, before the step


# Ids of another task are other ids, so that no parameter is of use to it.
TAKEN = {
    '': Taken(('step', 'params', 'opt_state'), ('optimizer.name', 'data.task'), goes_on=True, words='at'),
    'params': Taken(('params',), ('data.task',), goes_on=False, words='with the parameters of'),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """A checkpoint that a fork comes from."""

    folder: Folder
    step: int
    spec: Spec
    takes: Takes = ''

    def __str__(self) -> str:
        return f'--from={named(self.takes, self.folder, self.step)}'

    @property
    def taken(self) -> Taken:
        return TAKEN[self.takes]

    @property
    def start(self) -> int:
        """The step that the fork begins after."""
        return self.step if self.taken.goes_on else 0


def check(origin: Origin | None, spec: Spec, folder: Folder, group: Group) -> None:
    """Refuses what cannot be carried over into a new folder, before any data is read."""
    if once(group, 'new fork', lambda: origin is not None and not folder.is_claimed()):
        once(group, 'what is carried over', lambda: compare(origin, spec))
        verify(origin, group)
        once(group, 'parts of --from', lambda: whole(origin))


def whole(origin: Origin) -> None:
    """Refuses a checkpoint that does not hold what is to be taken along, as that of an imported model."""
    if missing := set(origin.taken.parts) - restore.metadata(path(origin)).metadata.keys():
        only = named('params', origin.folder, origin.step)
        raise Refusal(f'{path(origin)} holds no {min(missing)}, which {origin} takes along; give --from={only}')


def compare(origin: Origin, spec: Spec) -> None:
    """Refuses an origin whose state is none of this spec."""
    if (steps := spec.optimizer.steps) <= origin.start:
        raise Refusal(f'{origin} leaves nothing to train of config.optimizer.steps={steps}; give more of them')
    theirs, ours = fields(origin.spec), fields(spec)
    for name in origin.taken.kept:
        if theirs[name] != ours[name]:
            raise Refusal(f'config.{name} is {theirs[name]} in {origin} and {ours[name]} here; a fork keeps it')
    before, now = parameters(origin.spec), parameters(spec)
    for name in before:
        if now.get(name, before[name]) != before[name]:
            raise Refusal(
                f'{name} has the shape {before[name]} in {origin} and {now[name]} here '
                f'({"; ".join(differences(theirs, ours))}); what a fork carries over keeps its shape'
            )


def verify(origin: Origin | None, group: Group) -> None:
    """Refuses a checkpoint that is not sound, or is another one on another process."""

    def seal() -> str | None:
        return digests.seal(origin.folder, origin.step) if origin else None

    first = once(group, 'digests of --from', seal)
    awaited(lambda: seal() == first)
    same(group, 'content of --from', {'the checkpoint of --from (its digests)': seal()})
    if fault := fault_of(origin.folder, origin.step, group):
        others = [step for step in origin.folder.checkpoint_steps() if step != origin.step]
        raise Refusal(
            f'{path(origin)} is not sound: {fault.why}; give another step of {origin.folder}'
            f'{f" ({others})" if others else ""}'
        )


def lineage(origin: Origin, spec: Spec, folder: Folder, data: dict[str, str | int]) -> dict:
    """What row.json says of a fork in a folder that reads this data."""
    changes, before, now = differences(fields(origin.spec), fields(spec)), parameters(origin.spec), parameters(spec)
    anew = {} if origin.taken.goes_on else dict(takes=origin.takes, start=origin.start)
    return dict(
        run=relative(origin.folder.path, folder.path),
        step=origin.step,
        seal=digests.seal(origin.folder, origin.step),
        row=origin.folder.read('row').get('row') or origin.folder.path.name,
        commit=origin.folder.environment().get('commit'),
        config=changes,
        new=[name for name in now if name not in before],
        dropped=[name for name in before if name not in now],
        data=other_data(origin, changes, data),
        **anew,
    )


def other_data(origin: Origin, changes: list[str], data: dict[str, str | int]) -> list[str]:
    """In what the data of a fork is not that of its origin, as it may be where the changes of the config say so.

    What does not go on in the data of its origin may have others in any case.
    """
    before = restore.metadata(path(origin)).custom_metadata['data']
    differ = differences(before, {name: data.get(name) for name in before})  # of a model that is imported, few
    if before.get('tokenizer') != data.get('tokenizer'):
        raise Refusal(
            f'{origin} has another tokenizer ({"; ".join(differ)}); its ids are not those of this data; give '
            '--config.data.tokenizer=FILE, the tokenizer.json of its store'
        )
    if differ and origin.taken.goes_on and not any(change.startswith(READING) for change in changes):
        raise Refusal(f'{origin} was trained on other data ({"; ".join(differ)}); bring the old ones back')
    return differ


def begin(
    origin: Origin | None, spec: Spec, mesh: jax.sharding.Mesh, start: int, saved: Checkpoints
) -> tuple[int, list[str]]:
    """The step to go on from, and what was passed over for it.

    A fork, which begins after step `start`, gets what it takes along as a first checkpoint of its own where it has
    none that is sound; from there on it needs its origin no more.
    """
    newest, passed = saved.sound()
    if newest is not None:
        return newest, passed
    if known := once(saved.group, 'origin', lambda: require(origin, saved.folder)):
        verify(origin, saved.group)
        once(saved.group, 'origin as it was', lambda: unchanged(origin, known))
        saved.save(start, carried(origin, spec, mesh))
        saved.wait()
    return start, passed


def require(origin: Origin | None, folder: Folder) -> dict:
    """What a fork knows of its origin, without which it refuses to begin; nothing of a run that is none."""
    known = folder.lineage()
    if known and origin is None:
        begins = f'begins {TAKEN[known.get("takes", "")].words} step {known["step"]} of {known["run"]}'
        raise Refusal(f'{folder} has no checkpoint and {begins}; give --from again')
    return known


def unchanged(origin: Origin, known: dict) -> None:
    """Refuses a checkpoint that has come into the place of the origin's."""
    if digests.seal(origin.folder, origin.step) != known.get('seal'):
        raise Refusal(f'{path(origin)} is not what it was when the fork was begun; give a new --workdir')


def carried(origin: Origin, spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """What is taken of a verified origin as a state of this spec: by path, and what is new as in a fresh run."""
    whole = state.abstract(origin.spec, mesh)
    parts = {name: whole[name] for name in origin.taken.parts}
    reading = None if parts.keys() == whole.keys() else restore.partial()
    with one_line(path(origin)), reaching(path(origin)), ocp.Context(pytree_options=reading):
        before = leaves(ocp.load(path(origin), parts, checkpointable_name='state'))
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


def path(origin: Origin) -> Path:
    return absolute(origin.folder.checkpoints / str(origin.step))
