"""Compare-and-swap of small files on disks and in buckets, and the lock of a file on a disk.

On a disk, compare-and-replace and compare-and-delete take two steps, during which the process holds a lock. A bucket
compares by itself (conditional requests).
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from sinklab.errors import UserError
from sinklab.storage import untrusted_files
from sinklab.storage.atomic_write import atomic_write
from sinklab.storage.paths import get_file_system, is_remote

LOCK_TIMEOUT_SECONDS = 60.0  # a lease's lock is held for milliseconds, unless its owner is suspended or unreachable
NO_FLOCK_ERRNOS = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL  # errors of a disk without `flock`


@contextlib.contextmanager
def hold_lock(
    path: Path, timeout_seconds: float = LOCK_TIMEOUT_SECONDS, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the exclusive lock (`flock`) of a lock file on a local disk or on NFS.

    The kernel releases the lock when the process dies. The file stays. On a disk that reports ENOSYS, filelock warns,
    and uses a file that exists only while the lock is held; after a crash on another host, somebody has to delete it.

    Args:
        path: The lock file. It is created if it is missing, its folder is not.
        timeout_seconds: How long to wait for another process; -1: forever.
        on_wait: Callback before waiting for another process.

    Raises:
        UserError: Another process still holds the lock, or the disk supports no locks.
        DamagedFileError: Something other than a regular file is at the path.
        OSError: The file cannot be created or opened.
    """
    path.parent.stat()  # filelock would create a missing folder
    with contextlib.suppress(FileNotFoundError):
        untrusted_files.check_regular_stat(path, os.lstat(path))  # filelock would lock a FIFO
    lock = FileLock(path)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            lock.acquire(timeout=timeout_seconds)
    except Timeout:
        raise UserError(
            f'{path} has been locked by another process for {timeout_seconds:.0f} s; if no job uses the folder, '
            'delete the file'
        ) from None
    except OSError as error:
        if error.errno not in NO_FLOCK_ERRNOS:
            raise
        raise UserError(
            f'{path} cannot be locked ({error.strerror}); choose a folder on a disk that supports flock'
        ) from error
    try:
        yield
    finally:
        lock.release()


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
        with hold_lock(self.path.with_suffix(LOCK_SUFFIX)):
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
        """Delete the file and its lock file if it still has the text of this process, and close it.

        A process that waits for the lock notices that the lock file was deleted, and locks the new one. NFS may show
        the deletion late. Then, with three competing jobs, two can own the lease until one of them reads it again.
        """
        lock_path = self.path.with_suffix(LOCK_SUFFIX)
        with contextlib.suppress(OSError, UserError), hold_lock(lock_path):
            if self.is_ours(self.read()):
                self.path.unlink()
                lock_path.unlink()
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
