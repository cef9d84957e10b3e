"""The checkpoints of a folder as wholes, each with its digests: which are kept, taken away, and set aside."""

import contextlib
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path

from sinklab.checkpoint.orbax import TEMPORARY
from sinklab.files.whole import UNFINISHED, writable
from sinklab.folder import Folder
from sinklab.spec import Checkpoint

GOING = '.deleted'  # a name in one stroke, since files go one by one


def kept(steps: Iterable[int], rules: Checkpoint) -> list[int]:
    """Those of some steps whose checkpoints are kept."""
    ordered, every = sorted(steps), rules.keep_every_steps
    return [step for step in ordered if step in ordered[-rules.keep :] or (every and step % every == 0)]


def retain(folder: Folder, rules: Checkpoint) -> None:
    """Takes away what is no longer kept."""
    saved = folder.checkpoint_steps()
    for step in set(saved) - set(kept(saved, rules)):
        remove(folder, step)


def remove(folder: Folder, step: int) -> None:
    """Takes away all of a step: what is saved of it, or was being saved, and its digests."""
    with contextlib.suppress(FileNotFoundError):
        (folder.checkpoints / str(step)).replace(folder.checkpoints / f'{step}{GOING}')
    shutil.rmtree(folder.digests / str(step), ignore_errors=True)
    for path in folder.checkpoints.glob(f'{step}.*'):
        shutil.rmtree(path, ignore_errors=True)


def begin(folder: Folder, step: int) -> None:
    """Makes a place for the digests of a save; those of an earlier one of this step are of no checkpoint any more."""
    shutil.rmtree(folder.digests / str(step), ignore_errors=True)
    (folder.digests / str(step)).mkdir()


def tidy(folder: Folder) -> None:
    """Makes the folders, and takes away what an earlier process has left in them half done.

    Digests that were written stay without their checkpoint, which may have been moved away and may come back.
    """
    with writable(folder.checkpoints):
        folder.digests.mkdir(exist_ok=True)
        saved = set(map(str, folder.checkpoint_steps()))
        going = {path.name.removesuffix(GOING) for path in folder.checkpoints.glob(f'*{GOING}')}
        for path in folder.digests.iterdir():
            if path.name not in saved and (path.name in going or not any(path.glob('*.json'))):
                shutil.rmtree(path, ignore_errors=True)
        for path in folder.checkpoints.iterdir():
            if TEMPORARY in path.name or path.name.endswith(GOING):
                shutil.rmtree(path, ignore_errors=True)
        for path in (*folder.checkpoints.glob(f'*{UNFINISHED}'), *folder.digests.glob(f'*/*{UNFINISHED}')):
            path.unlink(missing_ok=True)


def set_aside(folder: Folder, step: int) -> Path:
    """Moves a checkpoint and its digests to where they are in nobody's way, and nothing is lost."""
    names = itertools.chain([f'{step}'], (f'{step}.{number}' for number in itertools.count(1)))
    aside = next(folder.damaged / name for name in names if not (folder.damaged / name).exists())
    aside.mkdir(parents=True)
    (folder.checkpoints / str(step)).replace(aside / 'checkpoint')
    with contextlib.suppress(FileNotFoundError):
        (folder.digests / str(step)).replace(aside / 'digests')
    return aside
