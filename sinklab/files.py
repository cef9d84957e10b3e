"""Files that appear whole, in folders that can be written."""

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
