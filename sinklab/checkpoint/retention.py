"""Retention, deletion, and quarantine of checkpoints in a run directory."""

import contextlib
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from sinklab.checkpoint import digests
from sinklab.checkpoint.orbax import TEMPORARY_SUFFIX as ORBAX_TEMPORARY_SUFFIX
from sinklab.config.spec import CheckpointConfig
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
from sinklab.storage import directories
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, writable_folder
from sinklab.storage.directories import DELETED_SUFFIX
from sinklab.storage.paths import is_remote
from sinklab.storage.permanent_errors import get_error_path


def select_retained_steps(steps: Iterable[int], retention_policy: CheckpointConfig) -> list[int]:
    """Select the steps whose checkpoints are retained."""
    ordered, keep_every_steps = sorted(steps), retention_policy.keep_every_steps
    return [
        step
        for step in ordered
        if step in ordered[-retention_policy.keep :] or (keep_every_steps and step % keep_every_steps == 0)
    ]


def delete_unretained_steps(run_dir: RunDir, retention_policy: CheckpointConfig) -> None:
    """Delete checkpoints that are not retained."""
    saved_steps = run_dir.list_checkpoint_steps()
    for step in set(saved_steps) - set(select_retained_steps(saved_steps, retention_policy)):
        print_lines(delete_step(run_dir, step))


def delete_step(run_dir: RunDir, step: int) -> list[str]:
    """Delete a step: its checkpoint, unfinished saves of it, and its digests.

    Returns:
        A line for each directory that still has files on the disk. It is no longer a checkpoint but takes space; the
        next attempt at the run tries to delete it again.

    Raises:
        OSError: The checkpoint cannot be renamed, and so is still a checkpoint; or a bucket does not delete it.
    """
    directories.mark_deleted(run_dir.checkpoint_dir / str(step))
    checkpoint_dirs = run_dir.checkpoint_dir / str(step), *run_dir.checkpoint_dir.glob(f'{step}.*')
    return try_to_delete([run_dir.digest_dir / str(step), *checkpoint_dirs])


def try_to_delete(paths: Iterable[Path]) -> list[str]:
    """Delete directories, and return a line for each one on a disk that cannot be deleted."""
    lines = []
    for path in paths:
        try:
            directories.remove_folder(path)
        except OSError as error:
            if is_remote(path):
                raise
            lines.append(
                f'{path} could not be deleted ({error.strerror}: {get_error_path(error) or path}); delete it'
            )
    return lines


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def make_digest_dir(run_dir: RunDir, step: int) -> None:
    """Make an empty directory for the digests of a save."""
    directories.remove_folder(run_dir.digest_dir / str(step))
    directories.make_folder(run_dir.digest_dir / str(step))


def clean_up_run_dir(run_dir: RunDir) -> None:
    """Make the directories, and delete files that an earlier process has left incomplete.

    Complete digests without a checkpoint stay, because the checkpoint may have been moved away temporarily.
    """
    with writable_folder(run_dir.checkpoint_dir), writable_folder(run_dir.digest_dir):
        saved_names = set(map(str, run_dir.list_checkpoint_steps()))
        partial_paths = [
            path for path in directories.list_entries(run_dir.checkpoint_dir) if is_partial(path.name, saved_names)
        ]
        for path in partial_paths:
            check_is_partial(run_dir, path)
        # STEP.UNIQUE.deleted on a disk, STEP in a bucket; earlier versions wrote STEP.deleted.
        deleted_names = {
            path.name.split('.')[0] if path.name.endswith(DELETED_SUFFIX) else path.name for path in partial_paths
        }
        for path in directories.list_entries(run_dir.digest_dir):
            if path.name not in saved_names and (path.name in deleted_names or not any(path.glob('*.json'))):
                print_lines(try_to_delete([path]))
        print_lines(try_to_delete(partial_paths))
        for path in (
            *run_dir.checkpoint_dir.glob(f'*{TEMPORARY_SUFFIX}'),
            *run_dir.digest_dir.glob(f'*/*{TEMPORARY_SUFFIX}'),
        ):
            path.unlink(missing_ok=True)


def is_partial(name: str, saved_names: set[str]) -> bool:
    """Return whether a directory is a checkpoint that is incomplete or partly deleted."""
    return (
        ORBAX_TEMPORARY_SUFFIX in name
        or name.endswith(DELETED_SUFFIX)
        or (name.isdigit() and name not in saved_names)
    )


def check_is_partial(run_dir: RunDir, path: Path) -> None:
    """Raise UserError if a checkpoint is complete, but was copied to a bucket without its commit marker."""
    if not path.name.isdigit() or (path / DELETED_SUFFIX).exists():
        return
    if isinstance(digests.read_any_digests(run_dir, int(path.name)), digests.CheckpointDigests):
        raise UserError(
            f'{path} has no {directories.COMMIT_MARKER}, as after a copy from a disk; put an empty object of '
            'that name there, or delete it'
        )


def quarantine_step(run_dir: RunDir, step: int) -> Path:
    """Move a checkpoint and its digests to the quarantine directory."""
    names = itertools.chain([f'{step}'], (f'{step}.{number}' for number in itertools.count(1)))
    quarantine_dir = next(
        run_dir.quarantine_dir / name for name in names if not (run_dir.quarantine_dir / name).exists()
    )
    with writable_folder(quarantine_dir):
        directories.move_folder(run_dir.checkpoint_dir / str(step), quarantine_dir / 'checkpoint')
        with contextlib.suppress(FileNotFoundError):
            directories.move_folder(run_dir.digest_dir / str(step), quarantine_dir / 'digests')
    return quarantine_dir
