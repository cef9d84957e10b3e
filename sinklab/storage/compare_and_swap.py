"""Compare-and-swap of small files on disks and in buckets, and the lock file that it uses on disks.

Processes on several hosts may share a disk. A process acquires the lock by creating the file, and releases it some
milliseconds later by deleting the file. If the process dies, the file stays: a process that has waited long enough
breaks the lock by putting a file of its own in its place. Compare-and-replace and compare-and-delete take two steps.
A process that takes them holds the kernel's lock (`flock`) on the file that it compares, so that no other process
changes the file in between. The kernel releases the `flock` when a process dies.
"""

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from sinklab.storage import untrusted_files
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, atomic_write
from sinklab.storage.paths import get_file_system, is_remote
from sinklab.storage.untrusted_files import DamagedFileError

STALE_LOCK_SECONDS = 10.0  # a lock is held for milliseconds; after these seconds its owner counts as dead
FLOCK_WAIT_FACTOR = 6  # times as long until the holder of the `flock` counts as suspended
# Errors of a disk without `flock`, or of NFS for a file that this user may only read.
NO_FLOCK_ERRNOS = errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF


@contextlib.contextmanager
def acquire_lock(path: Path) -> Iterator[None]:
    """Hold the lock for a critical section of a few milliseconds.

    If the owner dies inside the section, other processes wait STALE_LOCK_SECONDS once, and then break the lock.

    Raises:
        DamagedFileError: Something other than a regular file is at the path.
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
    """Delete the lock file if it is still that of this process, and close it."""
    try:
        with hold_flock(lock_fd):
            if read_file_identity(path) == get_descriptor_identity(lock_fd):
                path.unlink(missing_ok=True)
    finally:
        os.close(lock_fd)


def break_stale_lock(path: Path, stale_identity: tuple[int, int] | None) -> int | None:
    """Replace a stale lock by one of this process.

    On a disk without `flock`, if several processes do this at the same time, the last one gets the lock.

    Returns:
        A descriptor of the new file; None if another process was faster.
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
    """Open a lock file for `flock`.

    NFS needs write access for that. A file of another user may allow reading only.

    Raises:
        DamagedFileError: The file is not a regular file, or may not be read.
    """
    with untrusted_files.translate_lasting_errors(path):
        try:
            return untrusted_files.open_regular_descriptor(path, os.O_RDWR)
        except PermissionError:
            return untrusted_files.open_regular_descriptor(path)


@contextlib.contextmanager
def hold_flock(descriptor: int) -> Iterator[None]:
    """Hold the kernel's lock (`flock`) on an open file, if the disk supports it.

    A process holds it for less than a millisecond, unless it is suspended. After FLOCK_WAIT_FACTOR *
    STALE_LOCK_SECONDS the caller goes on without the lock.
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
    """Return (inode, modification time) of a lock file; None if there is none.

    Raises:
        DamagedFileError: A link to nothing, or something other than a regular file, is at the path.
    """
    try:
        with untrusted_files.translate_lasting_errors(path):
            descriptor = untrusted_files.open_regular_descriptor(path)  # NFS revalidates a file when it is opened
    except FileNotFoundError:
        if path.is_symlink():  # it prevents the creation of the lock file, and is no lock
            raise DamagedFileError(f'{path} is a broken link instead of a file; remove it') from None
        return None
    try:
        return get_descriptor_identity(descriptor)
    finally:
        os.close(descriptor)


def get_descriptor_identity(descriptor: int) -> tuple[int, int]:
    info = os.fstat(descriptor)
    return info.st_ino, info.st_mtime_ns


MAX_TEXT_BYTES = 1 << 20  # maximum bytes of the text
LOCK_SUFFIX = '.lock'  # replaces the suffix of the path, for the lock that is held while the file is replaced
TextPredicate = Callable[[str | None], bool]  # gets the current text; None if there is no file


class LocalCasFile:
    """A local file that stays open for `overwrite`.

    Once another process has replaced the file, `overwrite` writes to the old file, which nobody can read any more.
    """

    def __init__(self, path: Path, is_ours: TextPredicate):
        self.path, self.is_ours, self.descriptor = path, is_ours, None

    def read(self) -> str | None:
        try:
            return untrusted_files.read_regular_file(self.path, max_bytes=MAX_TEXT_BYTES).decode(errors='replace')
        except FileNotFoundError:
            return None

    def compare_and_swap(self, is_expected: TextPredicate, text: str) -> bool:
        """Replace the text if the current one is as expected; return whether it was."""
        with acquire_lock(self.path.with_suffix(LOCK_SUFFIX)):
            if not is_expected(self.read()):
                return False
            with atomic_write(self.path) as temporary_path:
                self.descriptor = os.open(temporary_path, os.O_RDWR | os.O_CREAT, 0o644)
                self.overwrite(text)
        return True

    def overwrite(self, text: str) -> None:
        """Overwrite the text by one of the same length.

        Readers can read the file at any time. The write also succeeds on a full disk.
        """
        os.pwrite(self.descriptor, text.encode(), 0)
        os.fsync(self.descriptor)

    def release(self) -> None:
        """Delete the file if it still has the text of this process, and close it."""
        with (
            contextlib.suppress(OSError, untrusted_files.DamagedFileError),
            acquire_lock(self.path.with_suffix(LOCK_SUFFIX)),
        ):
            if self.is_ours(self.read()):
                self.path.unlink()
        os.close(self.descriptor)


class RemoteCasFile:
    """An object that is replaced or deleted only if it still has the version that was seen last."""

    def __init__(self, path: Path, is_ours: TextPredicate):
        self.path, self.is_ours, self.file_system, self.version = path, is_ours, get_file_system(path), ''

    def read(self) -> str | None:
        try:
            return self.file_system.cat_file(os.fspath(self.path)).decode(errors='replace')
        except FileNotFoundError:
            return None

    def compare_and_swap(self, is_expected: TextPredicate, text: str) -> bool:
        current_text, self.version = self.read_with_version()
        return is_expected(current_text) and self.write_if_unchanged(text)

    def overwrite(self, text: str) -> None:
        """Overwrite the object, even if the response to an earlier write was lost."""
        if not self.write_if_unchanged(text):
            current_text, version = self.read_with_version()
            if self.is_ours(current_text):
                self.version = version
                self.write_if_unchanged(text)

    def write_if_unchanged(self, text: str) -> bool:
        """Write the object if it has the version that was seen last; return whether it had."""
        version = self.file_system.write_if_match(os.fspath(self.path), text.encode(), self.version)
        self.version = version or self.version
        return bool(version)

    def read_with_version(self) -> tuple[str | None, str]:
        """Return the text of the object and its version."""
        try:
            content, version = self.file_system.read_with_version(os.fspath(self.path))
        except FileNotFoundError:
            return None, ''
        return content.decode(errors='replace'), version

    def release(self) -> None:
        with contextlib.suppress(OSError):
            current_text, version = self.read_with_version()
            if self.is_ours(current_text):
                self.file_system.remove_if_match(os.fspath(self.path), version)


def open_cas_file(path: Path, is_ours: TextPredicate = lambda text: False) -> LocalCasFile | RemoteCasFile:
    return (RemoteCasFile if is_remote(path) else LocalCasFile)(path, is_ours)
