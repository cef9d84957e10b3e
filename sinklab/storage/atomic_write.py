"""Atomic writes: a file gets its name when it is complete."""

import contextlib
import errno
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sinklab.errors import UserError
from sinklab.storage import untrusted_files
from sinklab.storage.paths import (
    PERMANENT_ERRNOS,
    describe_permission,
    get_error_path,
    get_file_system,
    is_remote,
)

UNWRITABLE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EEXIST, *PERMANENT_ERRNOS)
UNWRITABLE_ERRNOS += (errno.ENXIO,)  # of a missing bucket
TEMPORARY_SUFFIX = '.unfinished'
SHARED_DISK_SECONDS = 5.0  # seconds until a network file system shows a new file on all hosts
UPLOAD_PART_BYTES = 32 << 20  # bytes of a large file that one request uploads
T = TypeVar('T')


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write, which is renamed to `path`, or uploaded there, once it is complete."""
    if is_remote(path):
        with tempfile.TemporaryDirectory() as temporary_dir:
            yield (temporary_path := Path(temporary_dir, path.name))
            upload_file(temporary_path, path)
        return
    temporary_path = path.with_name(
        f'{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}'
    )  # unique, since other processes may write the same file
    try:
        yield temporary_path
        with temporary_path.open('rb') as file:
            os.fsync(file.fileno())
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def upload_file(local_path: Path, path: Path) -> None:
    """Upload a local file into a bucket atomically."""
    get_file_system(path).put_file(os.fspath(local_path), os.fspath(path), chunksize=UPLOAD_PART_BYTES)


def append_text(path: Path, text: str) -> None:
    """Append to a small file; an object is rewritten as a whole and must have only one writer.

    Raises:
        DamagedFileError: A folder, a FIFO, a socket or a device is at the path.
    """
    if not is_remote(path):
        untrusted_files.check_regular_file(path)
        # Without O_NONBLOCK, `open` would wait for a reader if a FIFO has replaced the file since the check.
        with open(path, 'a', encoding='utf-8', opener=open_nonblocking) as file:
            untrusted_files.check_regular_stat(path, os.fstat(file.fileno()))
            file.write(text)
        return
    existing = path.read_text() if path.exists() else ''
    with atomic_write(path) as temporary_path:
        temporary_path.write_text(existing + text, encoding='utf-8')


def open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def poll_until(read: Callable[[], T]) -> T:
    """Call `read` until it returns a true value, for at most SHARED_DISK_SECONDS.

    A network file system may show a file late.

    Returns:
        The last value.
    """
    deadline = time.monotonic() + SHARED_DISK_SECONDS
    while not (result := read()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result


@contextlib.contextmanager
def open_writable_folder(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and translate errors of writing there into a UserError.

    Raises:
        UserError: The folder cannot be created or written.
    """
    try:
        if not is_remote(folder):  # buckets have no folders
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{folder} cannot be made ({error.strerror}); choose another folder') from error
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE_ERRNOS:
            raise
        permission = (
            describe_permission(get_error_path(error) or os.fspath(folder)) if error.errno in PERMANENT_ERRNOS else ''
        )
        remedy = 'make it' if error.errno == errno.ENXIO else 'change that' if permission else 'make room'
        raise UserError(
            f'{folder} cannot be written ({error.strerror}){f": {permission}" if permission else ""}; '
            f'choose another folder, or {remedy} and run the same command again: finished files there are kept'
        ) from error
