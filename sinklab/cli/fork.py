"""--from=RUN[@STEP], the checkpoint that a fork comes from."""

import dataclasses
from pathlib import Path
from typing import Any

from sinklab.cli.config import spec_of
from sinklab.folder import Folder
from sinklab.record import Refusal


@dataclasses.dataclass(frozen=True)
class Parent:
    """A run, which a fork that has begun can do without, and a step of it."""

    folder: Folder
    step: int


def parent(given: str, child: Folder) -> Parent:
    """What is given, with the newest step where none is; what a fork that has begun has come from."""
    name, _, step = given.rpartition('@')
    if not name or not step.isdecimal() or Folder(given).is_claimed():
        name, step = given, ''
    folder = Folder(name)
    if folder.path.resolve() == child.path.resolve():
        raise Refusal(f'--from={given} is the --workdir, too; give a new folder')
    if child.is_claimed():
        return known(given, folder, step, child)
    if not folder.is_claimed():
        raise Refusal(f'--from={given}: {folder} holds no run; give a run folder, and a step: --from=RUN@STEP')
    saved = folder.checkpoint_steps()
    if not saved:
        raise Refusal(f'--from={given}: {folder} has no checkpoint yet')
    if step and int(step) not in saved:
        raise Refusal(f'--from={given}: {folder} has checkpoints of the steps {", ".join(map(str, saved))}; give one')
    return Parent(folder, int(step) if step else saved[-1])


def known(given: str, folder: Folder, step: str, child: Folder) -> Parent:
    """What a folder that holds a run says that it has come from."""
    lineage = child.lineage()
    if not lineage:
        raise Refusal(f'{child} holds a run that is no fork; give a new folder, or leave --from out to go on in it')
    told = Path(child.path, lineage['run']).resolve(), str(lineage['step'])
    if told != (folder.path.resolve(), step or told[1]):
        raise Refusal(
            f'{child} holds a fork of {told[0]}@{told[1]}, and --from={given} is given; leave that out to go on, or '
            'give a new folder'
        )
    return Parent(folder, lineage['step'])


def origin(parent: Parent) -> Any:
    """What the training loop is to go on from; None where the parent is gone."""
    from sinklab.train.fork import Origin

    folder = parent.folder
    return Origin(folder, parent.step, spec_of(folder)) if folder.is_claimed() else None
