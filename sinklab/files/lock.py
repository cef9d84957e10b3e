"""A lock, for those who change a file together on a disk that several hosts may share.

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

from sinklab.files import regular
from sinklab.files.regular import Damaged
from sinklab.files.whole import UNFINISHED

DEAD = 10.0  # seconds until whoever has a lock, for some milliseconds, is taken for dead
STOPPED = 6  # times as long until whoever holds the kernel's lock is taken for stopped
# Of a disk without such locks, or on NFS of a file that this user may only read.
UNKNOWN = errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock for a few milliseconds; others wait once in vain for a process that dies inside.

    Raises:
        Damaged: what stands in the place of the file is no regular file.
    """
    there, since = None, time.monotonic()
    while True:
        try:
            mine = create(path)
            break
        except FileExistsError:
            before, there = there, mark(path)
        if there != before:
            since = time.monotonic()
        if time.monotonic() - since > DEAD and (mine := take_over(path, there)) is not None:
            break
        time.sleep(DEAD / 1000)
    try:
        yield
    finally:
        release(path, mine)


def release(path: Path, mine: int) -> None:
    """Delete the file of a lock, if it is still ours."""
    try:
        with excluding(mine):
            if mark(path) == identity(mine):
                path.unlink(missing_ok=True)
    finally:
        os.close(mine)


def take_over(path: Path, dead: tuple[int, int] | None) -> int | None:
    """Put a lock in the place of a dead one's.

    On a disk without locks of the kernel, of several that come here at the same time the last has it.

    Returns:
        A descriptor of the new file, or None where somebody else was first.
    """
    try:
        theirs = reopen(path)
    except FileNotFoundError:
        return None
    unfinished, mine = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}'), None
    try:
        with excluding(theirs):
            if identity(theirs) != dead or mark(path) != dead:
                return None
            mine = create(unfinished)
            unfinished.replace(path)
        time.sleep(DEAD / 10)
        if mark(path) == identity(mine):
            mine, kept = None, mine
            return kept
        return None
    finally:
        unfinished.unlink(missing_ok=True)
        os.close(theirs)
        if mine is not None:
            os.close(mine)


def create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)


def reopen(path: Path) -> int:
    """Open the file of a lock as NFS wants it for locks of the kernel; of another user, as far as that is allowed.

    Raises:
        Damaged: it is no regular file, or may not be read.
    """
    with regular.naming_lasting_errors(path):
        try:
            return regular.open_descriptor(path, os.O_RDWR)
        except PermissionError:
            return regular.open_descriptor(path)


@contextlib.contextmanager
def excluding(file: int) -> Iterator[None]:
    """Hold the kernel's lock on an open file, where the disk has such locks.

    Whoever holds it does so for less than a millisecond, unless it is stopped; it is then not waited for any more.
    """
    until = time.monotonic() + STOPPED * DEAD
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(DEAD / 1000)
        except OSError as error:
            if error.errno not in UNKNOWN:
                raise
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def mark(path: Path) -> tuple[int, int] | None:
    """Return which file this is; None where there is none. Raises Damaged for what is no regular file."""
    try:
        with regular.naming_lasting_errors(path):
            file = regular.open_descriptor(path)  # a network's disk looks again where a file is opened
    except FileNotFoundError:
        if path.is_symlink():  # which keeps the file from being made, and is nobody's lock
            raise Damaged(f'{path} is a link to nothing where a file has to be; remove it') from None
        return None
    try:
        return identity(file)
    finally:
        os.close(file)


def identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_ino, found.st_mtime_ns
