"""Exclusive use of a folder by one job.

On a disk the job holds a lock on run.lock, which the system releases when the process ends. A bucket has no locks:
there the newest job owns the folder, and an older one stops before its next write. In both, owner.json names the job.
"""

import contextlib
import json
import math
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from sinklab.errors import UserError, print_status
from sinklab.storage.files import list_entries, open_writable_folder, read_json, write_text
from sinklab.storage.paths import is_remote

LOCK_FILE, OWNER_FILE = 'run.lock', 'owner.json'
DEFAULT_GRACE_SECONDS = 30.0  # seconds that a job may take to stop


class FolderTakenError(UserError):
    """Another job has taken over the folder: nothing more may be written there."""


@contextlib.contextmanager
def hold_folder(folder: Path, wait_seconds: float = 0.0) -> Iterator[Callable[[], None]]:
    """Use a folder exclusively; create it if it is missing, and delete it if nothing is written there.

    Args:
        folder: A folder on a disk or in a bucket.
        wait_seconds: How long to wait for a job that uses the folder on this disk, for example while it stops.

    Yields:
        A function that raises FolderTakenError if another job has taken over the folder; call it before each write.

    Raises:
        UserError: Another job uses the folder.
    """
    owner = dict(token=uuid.uuid4().hex, host=socket.gethostname(), process=os.getpid())

    def check_owner() -> None:
        if is_remote(folder) and read_owner(folder).get('token') != owner['token']:
            raise FolderTakenError(f'{describe_owner(folder)} has taken over {folder}; this job stops without a save')

    if is_remote(folder):
        try:
            write_text(folder / OWNER_FILE, json.dumps(owner) + '\n')
        except FileNotFoundError as error:
            raise UserError(f'the bucket of {folder} does not exist; make it, or give another') from error
        yield check_owner
        return
    with open_writable_folder(folder):
        pass
    with lock_file(folder / LOCK_FILE, wait_seconds):
        write_text(folder / OWNER_FILE, json.dumps(owner) + '\n')
        try:
            yield check_owner
        finally:
            if {path.name for path in list_entries(folder)} == {LOCK_FILE, OWNER_FILE}:
                shutil.rmtree(folder)


@contextlib.contextmanager
def lock_file(path: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of a file on a disk, which the system releases when the process ends; the file stays.

    Args:
        path: The lock file. It is created if it is missing, as is its folder.
        wait_seconds: How long to wait for another process; math.inf: without a limit.

    Raises:
        UserError: Another process still holds the lock.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        in_use = f'{path.parent} is in use by {describe_owner(path.parent)}'
        if wait_seconds:
            limit = f'{wait_seconds:.0f} s ' if math.isfinite(wait_seconds) else ''
            print_status(f'{in_use}; waiting {limit}for its end')
        try:
            lock.acquire(timeout=wait_seconds)
        except Timeout:
            raise UserError(f'{in_use}; wait for it, stop it, or give another folder') from None
    try:
        yield
    finally:
        lock.release()


def read_owner(folder: Path) -> dict:
    """Read owner.json of a folder; {} if it is missing or being written."""
    try:
        return read_json(folder / OWNER_FILE)
    except (FileNotFoundError, UserError):
        return {}


def describe_owner(folder: Path) -> str:
    owner = read_owner(folder)
    return f'process {owner.get("process")} on {owner.get("host")}' if owner else 'another process'
