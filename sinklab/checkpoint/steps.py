"""The checkpoints of a folder as wholes, each with its digests: which are kept, taken away, and set aside."""

import contextlib
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from sinklab.checkpoint import digests
from sinklab.checkpoint.orbax import TEMPORARY
from sinklab.files import tree
from sinklab.files.denied import path_of
from sinklab.files.place import is_remote
from sinklab.files.tree import GOING
from sinklab.files.whole import UNFINISHED, writable
from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.spec import Checkpoint


def kept(steps: Iterable[int], rules: Checkpoint) -> list[int]:
    """Those of some steps whose checkpoints are kept."""
    ordered, every = sorted(steps), rules.keep_every_steps
    return [step for step in ordered if step in ordered[-rules.keep :] or (every and step % every == 0)]


def retain(folder: Folder, rules: Checkpoint) -> None:
    """Takes away what is no longer kept."""
    saved = folder.checkpoint_steps()
    for step in set(saved) - set(kept(saved, rules)):
        tell(remove(folder, step))


def remove(folder: Folder, step: int) -> list[str]:
    """Takes away all of a step: what is saved of it, or was being saved, and its digests.

    Returns:
        A line for each folder of which files are left on the disk. It is no checkpoint any more, but takes room; the
        next attempt at the run tries again.

    Raises:
        OSError: the checkpoint cannot be renamed, and is still one; or the storage of a bucket does not delete.
    """
    tree.undo(folder.checkpoints / str(step))
    checkpoints = folder.checkpoints / str(step), *folder.checkpoints.glob(f'{step}.*')
    return try_to_remove([folder.digests / str(step), *checkpoints])


def try_to_remove(paths: Iterable[Path]) -> list[str]:
    """Delete folders, and return a line for each one on a disk that cannot be deleted."""
    lines = []
    for path in paths:
        try:
            tree.remove(path)
        except OSError as error:
            if is_remote(path):
                raise
            lines.append(f'{path} could not be deleted ({error.strerror}: {path_of(error) or path}); delete it')
    return lines


def tell(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def begin(folder: Folder, step: int) -> None:
    """Makes a place for the digests of a save; those of an earlier one of this step are of no checkpoint any more."""
    tree.remove(folder.digests / str(step))
    tree.make(folder.digests / str(step))


def tidy(folder: Folder) -> None:
    """Makes the folders, and takes away what an earlier process has left in them half done.

    Digests that were written stay without their checkpoint, which may have been moved away and may come back.
    """
    with writable(folder.checkpoints), writable(folder.digests):
        saved = set(map(str, folder.checkpoint_steps()))
        left = [path for path in tree.entries(folder.checkpoints) if is_left(path.name, saved)]
        for path in left:
            check_left(folder, path)
        # STEP.UNIQUE.deleted on a disk; STEP in a bucket, or as an earlier version has it STEP.deleted
        going = {path.name.split('.')[0] if path.name.endswith(GOING) else path.name for path in left}
        for path in tree.entries(folder.digests):
            if path.name not in saved and (path.name in going or not any(path.glob('*.json'))):
                tell(try_to_remove([path]))
        tell(try_to_remove(left))
        for path in (*folder.checkpoints.glob(f'*{UNFINISHED}'), *folder.digests.glob(f'*/*{UNFINISHED}')):
            path.unlink(missing_ok=True)


def is_left(name: str, saved: set[str]) -> bool:
    """Whether a folder of checkpoints is none: half saved, or half deleted."""
    return TEMPORARY in name or name.endswith(GOING) or (name.isdigit() and name not in saved)


def check_left(folder: Folder, path: Path) -> None:
    """Refuses to take away what was once whole, and has come into a bucket without what says so there."""
    if not path.name.isdigit() or (path / GOING).exists():
        return
    if isinstance(digests.read_of_any_run(folder, int(path.name)), digests.Digests):
        raise Refusal(
            f'{path} has no {tree.COMMIT}, as after a copy from a disk; put an empty object of that name there, or '
            'delete it'
        )


def set_aside(folder: Folder, step: int) -> Path:
    """Moves a checkpoint and its digests to where they are in nobody's way, and nothing is lost."""
    names = itertools.chain([f'{step}'], (f'{step}.{number}' for number in itertools.count(1)))
    aside = next(folder.damaged / name for name in names if not (folder.damaged / name).exists())
    with writable(aside):
        tree.move(folder.checkpoints / str(step), aside / 'checkpoint')
        with contextlib.suppress(FileNotFoundError):
            tree.move(folder.digests / str(step), aside / 'digests')
    return aside
