"""The digests of a checkpoint, of what its files hold: written after its commit, verified before it is read.

They lie in `digests/STEP/PROCESS.json` beside `checkpoints/`, which is Orbax's: what empties or swaps a folder there
leaves them as they were. A process digests what it has written, so that nothing is read over a network; a bucket's
storage is asked for its own digests. The folder of a step is made before its save begins, so that a save that was cut
short is told from digests that were lost.
"""

import contextlib
import dataclasses
import datetime
import errno
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import EllipsisType

from sinklab.files import run_files, tree
from sinklab.files.regular import Damaged
from sinklab.files.validation import is_relative_name
from sinklab.files.whole import awaited, whole
from sinklab.folder import Folder
from sinklab.record import Refusal

THREADS = min(4, os.cpu_count() or 1)  # hashing holds no lock, and more of them would take the loop's cores
OF_PROCESS, MANIFEST = 'ocdbt.process_', 'manifest.ocdbt'
RUN_ID = 'run_id'
OWN = re.compile(r'(?:^|\.)process_(\d+)$')  # in Orbax's names of what one process writes
FindId = Callable[[], str | None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why a checkpoint is not sound."""

    why: str
    cut_short: bool = False  # its save, as far as the digests tell


@dataclasses.dataclass(frozen=True)
class Digests:
    """What is known of a checkpoint's files: {name: (bytes, sha256)}."""

    files: dict[str, tuple[int, str]]
    written: str
    seconds: float
    run_ids: frozenset[str | None] = frozenset((None,))  # of its processes


def owner(name: str, count: int) -> int:
    """Which of `count` processes has written a file."""
    numbers = [int(match[1]) for part in name.split('/') if (match := OWN.search(part))]
    return numbers[0] if numbers and numbers[0] < count else 0


def find_unmerged(names: Iterable[str]) -> str | None:
    """Return the path of a manifest that a checkpoint lacks, without which Orbax cannot restore its arrays.

    Each process writes its arrays into a folder `ocdbt.process_N`. At the end of a save Orbax merges these folders
    into one manifest beside them, or skips that without an error where it finds none of them.

    Args:
        names: the paths of all files of the checkpoint, relative to it.
    """
    names = set(names)
    parents = {parent for name in names for parent in PurePosixPath(name).parents}
    wanted = {str(parent.with_name(MANIFEST)) for parent in parents if parent.name.startswith(OF_PROCESS)}
    return min(wanted - names, default=None)


def file_of(folder: Folder, step: int, process: int) -> Path:
    return folder.digests / str(step) / f'{process}.json'


def write(
    folder: Folder, step: int, process: int, count: int, seconds: float, run_id: str | EllipsisType | None = ...
) -> None:
    """Digest what one of `count` processes has written of a committed checkpoint, whose save took so long.

    Args:
        run_id: the id of the run; found in its folder if it is not given.
    """
    run_id = find_run_id(folder) if run_id is ... else run_id
    checkpoint = folder.checkpoints / str(step)

    def list_own() -> list[str]:
        names = [name for name in tree.names(checkpoint) if owner(name, count) == process]
        return [] if process == 0 and find_unmerged(names) else names

    own = awaited(list_own)
    if not own:
        raise FileNotFoundError(
            errno.ENOENT,
            f'the files that process {process} saved, or their {MANIFEST}, are not there',
            str(checkpoint),
        )
    found = tree.files(checkpoint, own)
    if lost := set(own) - found.keys():
        raise FileNotFoundError(errno.ENOENT, 'what was saved is gone', str(checkpoint / min(lost)))
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: (found[name].length, found[name].digest()), own)
        content = dict(
            step=step,
            process=process,
            processes=count,
            **({RUN_ID: run_id} if run_id else {}),
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            seconds=round(seconds, 3),
            files=dict(zip(own, digests, strict=True)),
        )
    with whole(file_of(folder, step, process)) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + '\n', encoding='utf-8')


def read(folder: Folder, step: int, run_id: FindId | None = None) -> Digests | Fault:
    """Read what all processes have digested of a step of this run; `run_id` as for `fault`."""
    return of_run(folder, read_of_any_run(folder, step), run_id or (lambda: find_run_id(folder)))


def find_run_id(folder: Folder) -> str | None:
    """Return the id of the run of a folder: that in run.json or, where it is missing, that of all its checkpoints.

    Returns:
        None for a run that is older than these ids, and for a folder without checkpoints.

    Raises:
        Refusal: run.json is damaged, or is missing where checkpoints have different ids.
    """
    if (said := folder.run_id()) is not None:
        return said
    found: dict[str | None, int] = {}  # with a step that has it
    for step in folder.checkpoint_steps():
        if isinstance(known := read_of_any_run(folder, step), Digests):
            found |= dict.fromkeys(known.run_ids, step)
    if found.keys() <= {None}:
        return None
    file = folder.path / 'run.json'
    if len(found) > 1:
        ids = ', '.join(sorted(f'{one or "no id"} in step {step}' for one, step in found.items()))
        raise Damaged(f'{file} is missing, and checkpoints of {folder} are of different runs ({ids}); bring it back')
    (run_id,) = found
    run_files.warn(
        file, f'{file} is missing; the id of the run is that of all its checkpoints, {run_id}; bring it back'
    )
    return run_id


def of_run(folder: Folder, known: Digests | Fault, run_id: FindId) -> Digests | Fault:
    """Return the digests of a checkpoint, or a fault where they are of a run with another id."""
    if isinstance(known, Fault) or (ours := run_id()) is None or known.run_ids == {ours}:
        return known
    theirs = ', '.join(sorted(one or 'no id' for one in known.run_ids - {ours}))
    return Fault(f'it is of another run ({theirs} in its digests, and {folder.path / "run.json"} says {ours})')


def id_finder(folder: Folder) -> FindId:
    """Return a function that finds the id of a run once, when it is first asked."""
    return functools.cache(functools.partial(find_run_id, folder))


def read_of_any_run(folder: Folder, step: int) -> Digests | Fault:
    """Return what all processes have digested of a step, whatever run it is of."""
    own = folder.digests / str(step)
    if not tree.is_made(own):
        return Fault(f'it has no digests ({own} is missing)')
    parts, count = [], 1
    while len(parts) < count:
        part = part_of(folder, step, len(parts))
        if isinstance(part, Fault):
            return part
        parts.append(part)
        count = parts[0]['processes']
    together = {name: tuple(digest) for part in parts for name, digest in part['files'].items()}
    written, seconds = (max(part[name] for part in parts) for name in ('written', 'seconds'))
    return Digests(together, written, seconds, frozenset(part.get(RUN_ID) for part in parts))


def newest(folder: Folder) -> int | None:
    """Return the step of the newest checkpoint whose save has come to its end."""

    def known(step: int) -> Digests | Fault:
        any_run = read_of_any_run(folder, step)
        with contextlib.suppress(Refusal):  # a damaged or missing run.json is refused where the run is read
            return of_run(folder, any_run, run_id)
        return any_run

    run_id, steps = id_finder(folder), reversed(folder.checkpoint_steps())
    return next((step for step in steps if isinstance(known(step), Digests)), None)


def seal(folder: Folder, step: int) -> str:
    """What tells a checkpoint from all others: 16 digits of one sha256 over all that was digested of it."""
    digest = hashlib.sha256()
    for file in sorted((folder.digests / str(step)).glob('*.json')):
        digest.update(f'{file.name} {hashlib.sha256(tree.content(file)).hexdigest()}\n'.encode())
    return digest.hexdigest()[:16]


def part_of(folder: Folder, step: int, process: int) -> dict | Fault:
    """Read what one process has digested, checked against its schema."""
    file = file_of(folder, step, process)
    try:
        part = run_files.read_json(file, 'digests')
    except FileNotFoundError:
        return Fault(
            f'its digests are incomplete ({file} is missing): its save was cut short, or goes on', cut_short=True
        )
    except Damaged:
        return Fault(f'its digests are damaged ({file})')
    if (part['step'], part['process']) != (step, process) or part['processes'] <= process:
        said = f'step {part["step"]}, process {part["process"]} of {part["processes"]}'
        return Fault(f'its digests are of another step or process ({file} says {said})')
    return part


def fault(folder: Folder, step: int, process: int = 0, count: int = 1, run_id: FindId | None = None) -> Fault | None:
    """Return what is wrong with a checkpoint, as far as the share of one of `count` processes shows it.

    Args:
        run_id: returns the id of the run, for who asks about many steps; otherwise it is found for this one.
    """
    checkpoint = folder.checkpoints / str(step)
    known = awaited(lambda: known if isinstance(known := read_of_any_run(folder, step), Digests) else None)
    digests = of_run(folder, known or read_of_any_run(folder, step), run_id or (lambda: find_run_id(folder)))
    if isinstance(digests, Fault):
        return digests
    if manifest := find_unmerged(digests.files):
        return Fault(f'it has no {manifest}, without which it cannot be restored')
    if process == 0 and (extra := set(tree.names(checkpoint)) - digests.files.keys() - {tree.COMMIT}):
        return Fault(f'{min(extra)} is there and was never saved')
    if outside := [name for name in digests.files if not is_relative_name(name)]:
        return Fault(f'its digests name {min(outside)!a}, which is no file of it')
    share = sorted(digests.files, key=lambda name: (-digests.files[name][0], name))[process::count]
    found = tree.files(checkpoint, share)
    with ThreadPoolExecutor(THREADS) as pool:
        changes = pool.map(lambda name: changed(found.get(name), *digests.files[name]), share)
        return next((Fault(f'{name} {change}') for name, change in zip(share, changes, strict=True) if change), None)


def changed(file: tree.File | None, size: int, digest: str) -> str | None:
    try:
        if not file:
            return 'is missing'
        if file.length != size:
            return f'has {file.length} bytes, and {size} were saved'
        return None if file.holds(digest) else 'does not hold what was saved'
    except tree.ABSENT:
        return 'is missing'
