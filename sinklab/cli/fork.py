"""--from=[TAKES:]RUN[@STEP], the checkpoint that a fork comes from, and what it takes along of it."""

import dataclasses
from typing import Any, get_args

from sinklab.checkpoint import digests
from sinklab.cli import llama
from sinklab.escape import quote_shell
from sinklab.files.place import joined, resolved
from sinklab.folder import Folder, named
from sinklab.group import Group, once, same, unanimous
from sinklab.llama import PREFIX
from sinklab.named import run_and_step, spec_of, wanted
from sinklab.record import Refusal
from sinklab.spec import Takes


@dataclasses.dataclass(frozen=True)
class Given:
    """--from, as it is given."""

    words: str
    takes: Takes
    folder: Folder
    step: int | None


@dataclasses.dataclass(frozen=True)
class Parent:
    """A run, which a fork that has begun can do without, a step of it, and what is taken along of that."""

    folder: Folder
    step: int
    takes: Takes


def parent(given: str | None, child: Folder, group: Group) -> Parent | None:
    """What is given, at a step that process 0 chooses, and that is the same on all processes."""
    if given and given.startswith(PREFIX):
        given = unanimous(group, 'import of --from', lambda: at_hand(given, child, group))
    read = unanimous(group, '--from', lambda: reading(given) if given else None)
    chosen = once(group, 'step of --from', lambda: choice(read, child) if read else None)
    same(group, 'steps of --from', {'--from': meant(read, chosen)})
    return Parent(read.folder, chosen, read.takes) if read else None


def at_hand(given: str, child: Folder, group: Group) -> str:
    """The parameters that hf:PATH stands for, as --from has them; what several processes read, all have to see."""
    if group.count > 1:
        raise Refusal(
            f'--from={given} is for one process; write it where all of them see it, by sinklab checkpoint import '
            f'{quote_shell(given)} --out=DIR, and give --from=params:DIR'
        )
    return llama.kept(given, child)


def reading(given: str) -> Given:
    """What is taken stands before the first colon; a path may have a colon, too."""
    takes, _, run = given.partition(':')
    if takes not in filter(None, get_args(Takes)):
        takes, run = '', given
    if not run:
        raise Refusal(f'--from={given} names no run; give {named(f"--from={takes}", "RUN", "STEP")}')
    return Given(given, takes, *run_and_step(run))


def meant(given: Given | None, chosen: int | None) -> str:
    """What all processes must have alike."""
    if not given:
        return 'not given'
    return f'{given.takes and f"{given.takes} of "}step {chosen if given.step is None else given.step}'


def choice(given: Given, child: Folder) -> int:
    """The given step, or the newest where none is; of a fork that has begun, the one that it has come from."""
    folder = given.folder
    if resolved(folder.path) == resolved(child.path):
        raise Refusal(f'--from={given.words} is the --workdir, too; give a new folder')
    if child.is_claimed():
        return known(given, child)
    if not folder.is_claimed():
        raise Refusal(
            f'--from={given.words}: {folder} holds no run; give a run folder, and a step: '
            f'--from={named(given.takes, "RUN", "STEP")}'
        )
    saved, whole = wanted(folder, given.step), digests.newest(folder)  # the last may still be being saved
    return saved[-1] if given.step is not None or whole is None else whole


def known(given: Given, child: Folder) -> int:
    """The step that a folder which holds a run says that it has come from."""
    lineage, folder = child.lineage(), given.folder
    if not lineage:
        raise Refusal(f'{child} holds a run that is no fork; give a new folder, or leave --from out to go on in it')
    told, at, takes = joined(child.path, lineage['run']), lineage['step'], lineage.get('takes', '')
    holds = f'{child} holds a fork of {named(takes, told, at)}, and --from={given.words}'
    elsewhere = told != resolved(folder.path)
    if given.step not in (None, at) or (elsewhere and digests.seal(folder, at) != lineage.get('seal')):
        raise Refusal(f'{holds} is another checkpoint; give that one, wherever it lies now, or a new folder')
    if given.takes != takes:
        raise Refusal(
            f'{holds} takes along something else of it; give {quote_shell(f"--from={named(takes, folder, at)}")}'
        )
    return at


def origin(parent: Parent) -> Any:
    """What the training loop is to go on from; None where the parent is gone."""
    from sinklab.train.fork import Origin

    folder = parent.folder
    return Origin(folder, parent.step, spec_of(folder), parent.takes) if folder.is_claimed() else None
