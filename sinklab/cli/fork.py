"""--from=RUN[@STEP], the checkpoint that a fork comes from."""

import dataclasses
from typing import Any

from sinklab.checkpoint import digests
from sinklab.cli import step
from sinklab.cli.config import spec_of
from sinklab.files.place import joined, resolved
from sinklab.folder import Folder
from sinklab.group import Group, once, same, unanimous
from sinklab.record import Refusal


@dataclasses.dataclass(frozen=True)
class Parent:
    """A run, which a fork that has begun can do without, and a step of it."""

    folder: Folder
    step: int


def parent(given: str | None, child: Folder, group: Group) -> Parent | None:
    """What is given, at a step that process 0 chooses, and that is the same on all processes."""
    folder, own = unanimous(group, '--from', lambda: step.named(given) if given else (None, None))
    chosen = once(group, 'step of --from', lambda: choice(given, folder, own, child) if given else None)
    same(group, 'steps of --from', {'--from': f'step {chosen if own is None else own}' if given else 'not given'})
    return Parent(folder, chosen) if given else None


def choice(given: str, folder: Folder, own: int | None, child: Folder) -> int:
    """The given step, or the newest where none is; of a fork that has begun, the one that it has come from."""
    if resolved(folder.path) == resolved(child.path):
        raise Refusal(f'--from={given} is the --workdir, too; give a new folder')
    if child.is_claimed():
        return known(given, folder, own, child)
    if not folder.is_claimed():
        raise Refusal(f'--from={given}: {folder} holds no run; give a run folder, and a step: --from=RUN@STEP')
    saved, whole = step.wanted(folder, own), digests.newest(folder)  # the last of all may still be being saved
    return saved[-1] if own is not None or whole is None else whole


def known(given: str, folder: Folder, own: int | None, child: Folder) -> int:
    """The step that a folder which holds a run says that it has come from."""
    lineage = child.lineage()
    if not lineage:
        raise Refusal(f'{child} holds a run that is no fork; give a new folder, or leave --from out to go on in it')
    told, at = joined(child.path, lineage['run']), lineage['step']
    if own not in (None, at) or (told != resolved(folder.path) and digests.seal(folder, at) != lineage.get('seal')):
        raise Refusal(
            f'{child} holds a fork of {told}@{at}, and --from={given} is another checkpoint; give that one, '
            'wherever it lies now, or a new folder'
        )
    return at


def origin(parent: Parent) -> Any:
    """What the training loop is to go on from; None where the parent is gone."""
    from sinklab.train.fork import Origin

    folder = parent.folder
    return Origin(folder, parent.step, spec_of(folder)) if folder.is_claimed() else None
