"""Digests of checkpoint files: written after a checkpoint is committed, and verified before it is read.

Each process writes STEP/digests_PROCESS.json with the size and the SHA-256 of the files that it has saved, so that
nothing is read over a network. In a bucket the digest is the one that the bucket reports.
"""

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec

from sinklab.errors import UserError
from sinklab.run_dir import COMMIT_FILE, RunDir, select_steps
from sinklab.storage.files import hash_file, list_file_infos, poll_until, read_json, write_text
from sinklab.storage.paths import is_remote

HASH_THREADS = min(4, os.cpu_count() or 1)  # hashing releases the GIL; more threads would slow training
NO_DIGESTS = 'it has no digests: its save was interrupted, or is still running'
PROCESS_PATTERN = re.compile(r'(?:^|\.)process_(\d+)(?:/|$)')  # in Orbax's names of files that one process writes


class FileDigests(msgspec.Struct):
    """digests_PROCESS.json: the files that one process has saved, {name: (bytes, digest)}."""

    processes: Annotated[int, msgspec.Meta(ge=1)]
    files: dict[str, tuple[int, str]]


def write_digests(checkpoint: Path, process: int, num_processes: int) -> None:
    """Write the digests of the files of a committed checkpoint that one of several processes has saved.

    Raises:
        FileNotFoundError: The files of this process, or the manifest without which none can be restored, are missing.
    """

    def list_own_names() -> list[str]:
        names = [name for name in list_saved_files(checkpoint) if get_writer(name, num_processes) == process]
        # Orbax merges the folders of processes, or skips that silently.
        is_merged = any(name.endswith('/manifest.ocdbt') and 'ocdbt.process_' not in name for name in names)
        return names if process or is_merged else []

    if not (names := poll_until(list_own_names)):
        raise FileNotFoundError(f'{checkpoint} lacks files that were saved')
    content = dict(processes=num_processes, files=compute_digests(checkpoint, names))
    write_text(get_digest_path(checkpoint, process), json.dumps(content, indent=1) + '\n')


def compute_digests(checkpoint: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return {name: (bytes, digest)} of those of the named files that exist."""
    infos = list_file_infos(checkpoint)
    names = [name for name in names if name in infos]
    if is_remote(checkpoint):
        # An object that was composed of parts has no md5Hash.
        kinds = {name: 'md5Hash' if infos[name].get('md5Hash') else 'crc32c' for name in names}
        return {name: (infos[name]['size'], f'{kinds[name]} {infos[name][kinds[name]]}') for name in names}
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = pool.map(lambda name: hash_file(checkpoint / name), names)
        return {name: (infos[name]['size'], digest) for name, digest in zip(names, digests, strict=True)}


def list_saved_files(checkpoint: Path) -> list[str]:
    """Return the names of the files that Orbax has saved."""
    return sorted(name for name in list_file_infos(checkpoint) if not name.startswith(('digests_', COMMIT_FILE)))


def get_writer(name: str, num_processes: int) -> int:
    """Return the index of the process that has written a file, of `num_processes` processes."""
    match = PROCESS_PATTERN.search(name)
    return int(match[1]) if match and int(match[1]) < num_processes else 0


def get_digest_path(checkpoint: Path, process: int) -> Path:
    return checkpoint / f'digests_{process}.json'


def read_digests(checkpoint: Path) -> dict[str, tuple[int, str]] | None:
    """Read the digests of all processes.

    Returns:
        {name: (bytes, digest)}; None if the save was interrupted, or still runs.

    Raises:
        DamagedFileError: A file of digests is damaged.
    """
    parts: list[dict] = []
    while not parts or len(parts) < parts[0]['processes']:
        try:
            parts.append(read_json(get_digest_path(checkpoint, len(parts)), FileDigests))
        except (FileNotFoundError, NotADirectoryError):
            return None
    return {name: tuple(digest) for part in parts for name, digest in part['files'].items()}


def find_damage(checkpoint: Path, process: int = 0, num_processes: int = 1) -> str | None:
    """Verify the share of the files of a checkpoint that one process reads; describe a damage, or return None."""
    try:
        files = poll_until(lambda: read_digests(checkpoint)) if num_processes > 1 else read_digests(checkpoint)
    except UserError as error:
        return str(error)
    if files is None:
        return NO_DIGESTS
    names = sorted(files, key=lambda name: (-files[name][0], name))[process::num_processes]
    found = compute_digests(checkpoint, names)
    for name in names:
        if name not in found:
            return f'{name} is missing'
        size, digest = files[name]
        found_size, found_digest = found[name]
        is_comparable = digest.split()[:-1] == found_digest.split()[:-1]  # else it was copied from or to a bucket
        if found_size != size or (is_comparable and found_digest != digest):
            return f'{name} differs from what was saved'
    return None


def find_newest_step(run_dir: RunDir) -> int | None:
    """Return the step of the newest checkpoint whose save is complete; its files are not verified."""
    for step in reversed(run_dir.list_checkpoint_steps()):
        try:
            if read_digests(run_dir.checkpoint_dir / str(step)):
                return step
        except UserError:
            continue
    return None


def select_checkpoint(run_dir: RunDir, step: int | None) -> int:
    """Return a step that has a checkpoint; None selects the newest whose save is complete.

    Raises:
        UserError: The run has no checkpoint at this step, or none at all.
    """
    saved_steps = select_steps(run_dir, step)
    newest_step = find_newest_step(run_dir) if step is None else None
    return saved_steps[-1] if newest_step is None else newest_step
