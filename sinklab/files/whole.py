"""Files that appear whole, in folders that can be written."""

import contextlib
import errno
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sinklab.files import regular
from sinklab.files.denied import PERMANENT, path_of, permission
from sinklab.files.place import is_remote, storage
from sinklab.record import Refusal

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EEXIST, *PERMANENT)
UNWRITABLE += (errno.ENXIO,)  # of a bucket that is not there
UNFINISHED = '.unfinished'
SHARED = 5.0  # seconds until a network's disk shows everywhere what is written on it
PART = 32 << 20  # bytes of a large file that go into a bucket by one request
T = TypeVar('T')


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write, which takes the name `path` once it is whole and lies on the disk, or in the bucket."""
    if is_remote(path):
        with tempfile.TemporaryDirectory() as scratch:
            yield (unfinished := Path(scratch, path.name))
            upload(unfinished, path)
        return
    unfinished = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}')  # others may be at the same
    try:
        yield unfinished
        with unfinished.open('rb') as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def upload(local: Path, path: Path) -> None:
    """Puts a local file into a bucket, in one stroke."""
    storage(path).put_file(os.fspath(local), os.fspath(path), chunksize=PART)


def append(path: Path, text: str) -> None:
    """Adds to a small file; an object is written anew, by one who writes it alone.

    Raises:
        Damaged: a folder, a FIFO, a socket or a device is in its place.
    """
    if not is_remote(path):
        regular.check(path)
        # Without O_NONBLOCK a reader would be waited for where a FIFO has come into its place since.
        with open(path, 'a', encoding='utf-8', opener=open_nonblocking) as file:
            regular.refuse_irregular(path, os.fstat(file.fileno()))
            file.write(text)
        return
    before = path.read_text() if path.exists() else ''
    with whole(path) as unfinished:
        unfinished.write_text(before + text, encoding='utf-8')


def open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


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
        if not is_remote(folder):  # in a bucket there are no folders
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f'{folder} cannot be made ({error.strerror}); choose another folder') from error
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        seen = permission(path_of(error) or os.fspath(folder)) if error.errno in PERMANENT else ''
        mend = 'make it' if error.errno == errno.ENXIO else 'change that' if seen else 'make room'
        raise Refusal(
            f'{folder} cannot be written ({error.strerror}){f": {seen}" if seen else ""}; choose another folder, or '
            f'{mend} and give the same command again: what is finished there is kept'
        ) from error
