"""Digests of checkpoint files: written after a checkpoint is committed, verified before it is read.

Digests are stored in `digests/STEP/PROCESS.json`, next to the `checkpoints/` directory, which belongs to Orbax. So
they do not change if a checkpoint directory is emptied or swapped. Each process digests the files that it has
written, so that nothing is read over a network; a bucket is asked for its own digests. The digest directory of a step
is made before its save begins, so that an interrupted save can be told from lost digests.
"""

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.run_ref import select_steps
from sinklab.storage import directories, run_file_schemas, untrusted_files
from sinklab.storage.atomic_write import atomic_write, poll_until
from sinklab.storage.untrusted_files import DamagedFileError, is_relative_name

HASH_THREADS = min(4, os.cpu_count() or 1)  # hashing releases the GIL; more threads would slow training
PROCESS_DIR_PREFIX, MANIFEST_NAME = 'ocdbt.process_', 'manifest.ocdbt'
RUN_ID_KEY = 'run_id'
PROCESS_PATTERN = re.compile(r'(?:^|\.)process_(\d+)$')  # in Orbax's names of files that one process writes


@dataclasses.dataclass(frozen=True)
class CorruptionReport:
    """Why a checkpoint is not valid."""

    reason: str
    is_incomplete: bool = False  # whether its save did not finish, according to its digests


@dataclasses.dataclass(frozen=True)
class CheckpointDigests:
    """Digests of the files of a checkpoint: {name: (bytes, sha256)}."""

    files: dict[str, tuple[int, str]]
    written: str
    seconds: float
    run_ids: frozenset[str | None] = frozenset((None,))  # as its processes recorded them


def get_writer_process(name: str, num_processes: int) -> int:
    """Return the index of the process that has written a file, of `num_processes` processes."""
    process_numbers = [int(match[1]) for part in name.split('/') if (match := PROCESS_PATTERN.search(part))]
    return process_numbers[0] if process_numbers and process_numbers[0] < num_processes else 0


def find_missing_manifest(names: Iterable[str]) -> str | None:
    """Return the path of a missing manifest, without which Orbax cannot restore arrays, or None.

    Each process writes its arrays into a directory `ocdbt.process_N`. At the end of a save Orbax merges these
    directories into one manifest next to them; if it finds none of them, it skips the merge without an error.

    Args:
        names: Paths of all files of the checkpoint, relative to it.
    """
    names = set(names)
    parents = {parent for name in names for parent in PurePosixPath(name).parents}
    expected = {
        str(parent.with_name(MANIFEST_NAME)) for parent in parents if parent.name.startswith(PROCESS_DIR_PREFIX)
    }
    return min(expected - names, default=None)


def get_digest_path(run_dir: RunDir, step: int, process: int) -> Path:
    return run_dir.digest_dir / str(step) / f'{process}.json'


def write_digests(
    run_dir: RunDir, step: int, process: int, num_processes: int, seconds: float, run_id: str | None = None
) -> None:
    """Write the digests of the files of a committed checkpoint that one process has written.

    Args:
        run_dir: Run directory.
        step: Step of the checkpoint.
        process: Index of this process.
        num_processes: Number of processes that have saved the checkpoint.
        seconds: Duration of the save.
        run_id: Id of the run; None to find it in the run directory.

    Raises:
        FileNotFoundError: A file that this process has saved, or the manifest, is missing.
    """
    run_id = run_id or find_run_id(run_dir)
    checkpoint = run_dir.checkpoint_dir / str(step)

    def list_local_names() -> list[str]:
        names = [
            name for name in directories.list_files(checkpoint) if get_writer_process(name, num_processes) == process
        ]
        return [] if process == 0 and find_missing_manifest(names) else names

    local_names = poll_until(list_local_names)
    if not local_names:
        raise FileNotFoundError(
            errno.ENOENT,
            f'the files that process {process} saved, or their {MANIFEST_NAME}, are missing',
            str(checkpoint),
        )
    local_files = directories.get_stored_files(checkpoint, local_names)
    if missing_names := set(local_names) - local_files.keys():
        raise FileNotFoundError(errno.ENOENT, 'a saved file is missing', str(checkpoint / min(missing_names)))
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        name_digests = pool.map(lambda name: (local_files[name].size, local_files[name].get_digest()), local_names)
        content = dict(
            step=step,
            process=process,
            processes=num_processes,
            **({RUN_ID_KEY: run_id} if run_id else {}),
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            seconds=round(seconds, 3),
            files=dict(zip(local_names, name_digests, strict=True)),
        )
    with atomic_write(get_digest_path(run_dir, step, process)) as temporary_path:
        temporary_path.write_text(json.dumps(content, indent=1) + '\n', encoding='utf-8')


def read_digests(run_dir: RunDir, step: int, run_id: str | None = None) -> CheckpointDigests | CorruptionReport:
    """Read the digests of all processes for a step of the run, whose id is read unless it is given."""
    return match_run_id(run_dir, read_digests_of_any_run(run_dir, step), run_id)


def find_run_id(run_dir: RunDir) -> str | None:
    """Return the id of a run, from run.json or, if that file is missing, from all checkpoints.

    Returns:
        The id; None for a run that is older than run ids, and for a directory without checkpoints.

    Raises:
        UserError: run.json is damaged, or it is missing and checkpoints have different ids.
    """
    if (stored_id := run_dir.read_run_id()) is not None:
        return stored_id
    step_of_id: dict[str | None, int] = {}  # id -> a step that has it
    for step in run_dir.list_checkpoint_steps():
        if isinstance(step_digests := read_digests_of_any_run(run_dir, step), CheckpointDigests):
            step_of_id |= dict.fromkeys(step_digests.run_ids, step)
    if step_of_id.keys() <= {None}:
        return None
    file = run_dir.path / 'run.json'
    if len(step_of_id) > 1:
        ids = ', '.join(sorted(f'{other_id or "no id"} in step {step}' for other_id, step in step_of_id.items()))
        raise DamagedFileError(
            f'{file} is missing, and checkpoints of {run_dir} have different run ids ({ids}); restore it from a copy'
        )
    (run_id,) = step_of_id
    run_file_schemas.warn_once(
        file, f'{file} is missing; the id of its checkpoints, {run_id}, is used; restore it from a copy'
    )
    return run_id


def match_run_id(
    run_dir: RunDir, step_digests: CheckpointDigests | CorruptionReport, run_id: str | None = None
) -> CheckpointDigests | CorruptionReport:
    """Return the digests of a checkpoint, or a CorruptionReport if their run has another id.

    Args:
        run_dir: Run directory.
        step_digests: The digests of a step, or why there are none.
        run_id: Id of the run; None to read it from the run directory.
    """
    if (
        isinstance(step_digests, CorruptionReport)
        or (expected_id := run_id or find_run_id(run_dir)) is None
        or step_digests.run_ids == {expected_id}
    ):
        return step_digests
    other_ids = ', '.join(sorted(other_id or 'no id' for other_id in step_digests.run_ids - {expected_id}))
    return CorruptionReport(
        f'it belongs to another run ({other_ids} in its digests, but {run_dir.path / "run.json"} says {expected_id})'
    )


def read_digests_of_any_run(run_dir: RunDir, step: int) -> CheckpointDigests | CorruptionReport:
    """Read the digests of all processes for a step, whatever their run id is."""
    digest_dir = run_dir.digest_dir / str(step)
    if not directories.is_folder(digest_dir):
        return CorruptionReport(f'it has no digests ({digest_dir} is missing)')
    parts, num_processes = [], 1
    while len(parts) < num_processes:
        part = read_process_digests(run_dir, step, len(parts))
        if isinstance(part, CorruptionReport):
            return part
        parts.append(part)
        num_processes = parts[0]['processes']
    files = {name: tuple(digest) for part in parts for name, digest in part['files'].items()}
    written, seconds = (max(part[name] for part in parts) for name in ('written', 'seconds'))
    return CheckpointDigests(files, written, seconds, frozenset(part.get(RUN_ID_KEY) for part in parts))


def find_newest_step(run_dir: RunDir) -> int | None:
    """Return the step of the newest checkpoint whose save is complete."""

    def is_complete(step: int) -> bool:
        any_digests = read_digests_of_any_run(run_dir, step)
        with contextlib.suppress(UserError):  # reading the run raises the error of a damaged or missing run.json
            any_digests = match_run_id(run_dir, any_digests)
        return isinstance(any_digests, CheckpointDigests)

    return next(filter(is_complete, reversed(run_dir.list_checkpoint_steps())), None)


def select_checkpoint(run_dir: RunDir, step: int | None) -> int:
    """Return a step that has a checkpoint; None selects the newest whose save is complete.

    If no save is complete, the newest step is returned, which readers reject with a reason.

    Raises:
        UserError: The run has no checkpoint at this step, or none at all.
    """
    saved_steps = select_steps(run_dir, step)
    newest = find_newest_step(run_dir) if step is None else None
    return saved_steps[-1] if newest is None else newest


def compute_checkpoint_digest(run_dir: RunDir, step: int) -> str:
    """Compute 16 hex digits that identify a checkpoint: SHA-256 over the digests of all its files."""
    digest = hashlib.sha256()
    for file in sorted((run_dir.digest_dir / str(step)).glob('*.json')):
        digest.update(f'{file.name} {hashlib.sha256(untrusted_files.read_regular_file(file)).hexdigest()}\n'.encode())
    return digest.hexdigest()[:16]


def read_process_digests(run_dir: RunDir, step: int, process: int) -> dict | CorruptionReport:
    """Read the digests of one process, and validate their schema."""
    file = get_digest_path(run_dir, step, process)
    try:
        part = run_file_schemas.read_run_file(file, 'digests')
    except FileNotFoundError:
        return CorruptionReport(
            f'its digests are incomplete ({file} is missing): its save was interrupted, or is still running',
            is_incomplete=True,
        )
    except DamagedFileError:
        return CorruptionReport(f'its digests are damaged ({file})')
    if (part['step'], part['process']) != (step, process) or part['processes'] <= process:
        description = f'step {part["step"]}, process {part["process"]} of {part["processes"]}'
        return CorruptionReport(f'its digests belong to another step or process ({file} says {description})')
    return part


def find_corruption(
    run_dir: RunDir, step: int, process: int = 0, num_processes: int = 1, run_id: str | None = None
) -> CorruptionReport | None:
    """Verify a share of the files of a checkpoint; return a CorruptionReport, or None if they are valid.

    Args:
        run_dir: Run directory.
        step: Step of the checkpoint.
        process: Index of this process, which determines its share.
        num_processes: Number of processes that share the files.
        run_id: Id of the run; None to read it from the run directory.
    """
    checkpoint = run_dir.checkpoint_dir / str(step)
    any_digests = poll_until(
        lambda: (
            any_digests
            if isinstance(any_digests := read_digests_of_any_run(run_dir, step), CheckpointDigests)
            else None
        )
    )
    digests = match_run_id(run_dir, any_digests or read_digests_of_any_run(run_dir, step), run_id)
    if isinstance(digests, CorruptionReport):
        return digests
    if manifest := find_missing_manifest(digests.files):
        return CorruptionReport(f'it has no {manifest}, and cannot be restored')
    if process == 0 and (
        extra := set(directories.list_files(checkpoint)) - digests.files.keys() - {directories.COMMIT_MARKER}
    ):
        return CorruptionReport(f'{min(extra)} exists, but was not saved')
    if invalid_names := [name for name in digests.files if not is_relative_name(name)]:
        return CorruptionReport(f'its digests name {min(invalid_names)!a}, which is not a file of it')
    local_names = sorted(digests.files, key=lambda name: (-digests.files[name][0], name))[process::num_processes]
    local_files = directories.get_stored_files(checkpoint, local_names)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        changes = pool.map(lambda name: describe_change(local_files.get(name), *digests.files[name]), local_names)
        return next(
            (
                CorruptionReport(f'{name} {change}')
                for name, change in zip(local_names, changes, strict=True)
                if change
            ),
            None,
        )


def describe_change(file: directories.StoredFile | None, size: int, digest: str) -> str | None:
    try:
        if not file:
            return 'is missing'
        if file.size != size:
            return f'has {file.size} bytes instead of {size}'
        return None if file.has_digest(digest) else 'differs from what was saved'
    except directories.ABSENT_ERRORS:
        return 'is missing'
