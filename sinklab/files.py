"""Files that appear whole, in folders that can be written; and a lock, for those who change one together."""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sinklab.record import Refusal

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
UNFINISHED = '.unfinished'
SHARED = 5.0  # seconds until a network's disk shows everywhere what is written on it
DEAD = 10.0  # seconds until whoever has a lock, for some milliseconds, is taken for dead
T = TypeVar('T')


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write, which takes the name `path` once it is whole and lies on the disk."""
    unfinished = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}')  # others may be at the same
    try:
        yield unfinished
        with unfinished.open('rb') as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def awaited(look: Callable[[], T]) -> T:
    """What is seen on a network's disk: as soon as there is something, or at last."""
    until = time.monotonic() + SHARED
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """A folder to write in, made if need be; says in words when that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f'{folder} cannot be made ({error.strerror}); choose another folder') from error
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise Refusal(
            f'{folder} cannot be written ({error.strerror}); choose another folder, or make room and give the same '
            'command again: what is finished there is kept'
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A few milliseconds in which nobody else is in here; whoever dies in them is waited for in vain once."""
    there, since = None, time.monotonic()
    while True:
        try:
            mine = mark(path, os.O_CREAT | os.O_EXCL)
            break
        except FileExistsError:
            before, there = there, mark(path)
        if there != before:
            since = time.monotonic()
        if time.monotonic() - since > DEAD and (mine := overtake(path, there)):
            break
        time.sleep(DEAD / 1000)
    try:
        yield
    finally:
        if mark(path) == mine:
            path.unlink(missing_ok=True)


def overtake(path: Path, dead: tuple[int, int]) -> tuple[int, int] | None:
    """Puts a lock in the place of a dead one's. Of several that have seen that at the same time, the last has it."""
    unfinished = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}')
    mine = mark(unfinished, os.O_CREAT | os.O_EXCL)
    if mark(path) == dead:
        unfinished.replace(path)
        time.sleep(DEAD / 10)
    unfinished.unlink(missing_ok=True)
    return mine if mark(path) == mine else None


def mark(path: Path, flags: int = os.O_RDONLY) -> tuple[int, int] | None:
    """Which file this is, none before it and none after."""
    try:
        file = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    return found.st_ino, found.st_mtime_ns
