"""A lock file for processes on several hosts that share a disk.

The lock is a file that one process makes, and deletes some milliseconds later. Of a process that has died the file
stays: whoever has waited for it long enough puts a file of its own in its place. To compare and to replace, or to
compare and to delete, are two steps; whoever takes them holds the kernel's lock (`flock`) on the file that is
compared, so that nobody else changes it in between. The kernel frees that lock when a process dies.
"""

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from sinklab.storage import untrusted_files
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX
from sinklab.storage.untrusted_files import DamagedFileError

STALE_LOCK_SECONDS = 10.0  # seconds until whoever has a lock, for some milliseconds, is taken for dead
FLOCK_WAIT_FACTOR = 6  # times as long until whoever holds the kernel's lock is taken for stopped
# Of a disk without such locks, or on NFS of a file that this user may only read.
NO_FLOCK_ERRNOS = errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF


@contextlib.contextmanager
def acquire_lock(path: Path) -> Iterator[None]:
    """Hold the lock for a few milliseconds; others wait once in vain for a process that dies inside.

    Raises:
        DamagedFileError: what stands in the place of the file is no regular file.
    """
    identity, unchanged_since = None, time.monotonic()
    while True:
        try:
            lock_fd = create_lock_file(path)
            break
        except FileExistsError:
            previous_identity, identity = identity, read_file_identity(path)
        if identity != previous_identity:
            unchanged_since = time.monotonic()
        if (
            time.monotonic() - unchanged_since > STALE_LOCK_SECONDS
            and (lock_fd := break_stale_lock(path, identity)) is not None
        ):
            break
        time.sleep(STALE_LOCK_SECONDS / 1000)
    try:
        yield
    finally:
        release_lock(path, lock_fd)


def release_lock(path: Path, lock_fd: int) -> None:
    """Delete the file of a lock, if it is still ours."""
    try:
        with hold_flock(lock_fd):
            if read_file_identity(path) == get_descriptor_identity(lock_fd):
                path.unlink(missing_ok=True)
    finally:
        os.close(lock_fd)


def break_stale_lock(path: Path, stale_identity: tuple[int, int] | None) -> int | None:
    """Replace a stale lock by one of this process.

    On a disk without locks of the kernel, of several that come here at the same time the last has it.

    Returns:
        A descriptor of the new file, or None where somebody else was first.
    """
    try:
        stale_fd = open_lock_file(path)
    except FileNotFoundError:
        return None
    temporary_path, lock_fd = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}'), None
    try:
        with hold_flock(stale_fd):
            if get_descriptor_identity(stale_fd) != stale_identity or read_file_identity(path) != stale_identity:
                return None
            lock_fd = create_lock_file(temporary_path)
            temporary_path.replace(path)
        time.sleep(STALE_LOCK_SECONDS / 10)
        if read_file_identity(path) == get_descriptor_identity(lock_fd):
            lock_fd, acquired_fd = None, lock_fd
            return acquired_fd
        return None
    finally:
        temporary_path.unlink(missing_ok=True)
        os.close(stale_fd)
        if lock_fd is not None:
            os.close(lock_fd)


def create_lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)


def open_lock_file(path: Path) -> int:
    """Open the file of a lock as NFS wants it for locks of the kernel; of another user, as far as that is allowed.

    Raises:
        DamagedFileError: it is no regular file, or may not be read.
    """
    with untrusted_files.translate_lasting_errors(path):
        try:
            return untrusted_files.open_regular_descriptor(path, os.O_RDWR)
        except PermissionError:
            return untrusted_files.open_regular_descriptor(path)


@contextlib.contextmanager
def hold_flock(descriptor: int) -> Iterator[None]:
    """Hold the kernel's lock on an open file, where the disk has such locks.

    Whoever holds it does so for less than a millisecond, unless it is stopped; it is then not waited for any more.
    """
    deadline = time.monotonic() + FLOCK_WAIT_FACTOR * STALE_LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(STALE_LOCK_SECONDS / 1000)
        except OSError as error:
            if error.errno not in NO_FLOCK_ERRNOS:
                raise
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def read_file_identity(path: Path) -> tuple[int, int] | None:
    """Return which file this is; None where there is none. Raises DamagedFileError for what is no regular file."""
    try:
        with untrusted_files.translate_lasting_errors(path):
            descriptor = untrusted_files.open_regular_descriptor(
                path
            )  # a network's disk looks again where a file is opened
    except FileNotFoundError:
        if path.is_symlink():  # which keeps the file from being made, and is nobody's lock
            raise DamagedFileError(f'{path} is a link to nothing where a file has to be; remove it') from None
        return None
    try:
        return get_descriptor_identity(descriptor)
    finally:
        os.close(descriptor)


def get_descriptor_identity(descriptor: int) -> tuple[int, int]:
    info = os.fstat(descriptor)
    return info.st_ino, info.st_mtime_ns
