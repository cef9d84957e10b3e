"""A lock, for those who change a file together on a disk that several hosts may share."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from sinklab.files.whole import UNFINISHED

DEAD = 10.0  # seconds until whoever has a lock, for some milliseconds, is taken for dead


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
