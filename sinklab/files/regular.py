"""Regular files, read so that nothing can hang: what stands in the place of one is named and not opened."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sinklab.files.place import is_remote, storage
from sinklab.record import Refusal

LARGEST = 4 << 30  # bytes of a file that is read as a whole
RANGE_NOT_SATISFIABLE = 416  # of HTTP
KINDS = {
    stat.S_IFDIR: 'a folder',
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
}
# Errors that a command meets again if it is started again, unlike those of a disk that does not answer.
LASTING = errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EISDIR
WRONG_KIND = errno.ELOOP, errno.EISDIR


class Damaged(Refusal):
    """A file is not what it has to be. The message names it, and says what to do."""


class Irregular(Damaged):
    """Something else stands in the place of the file: a folder, a FIFO, a link to itself, a far larger file.

    A permission that is refused is no proof of that: credentials for Kerberos or NFS expire and are renewed.
    """


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its bytes.

    Raises:
        Irregular: it is a folder, a FIFO, a socket or a device.
        Damaged: it may not be read.
        FileNotFoundError: it is not there.
    """
    if is_remote(path):
        with path.open('rb') as file:
            yield file
        return
    with naming_lasting_errors(path):
        refuse_irregular(path, os.stat(path))
        descriptor = open_descriptor(path)
    with os.fdopen(descriptor, 'rb') as file:
        yield file


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of a disk without waiting. Raises Damaged for what is none, and OSError as os.open does."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # a FIFO would be waited for without it
    try:
        refuse_irregular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def naming_lasting_errors(path: Path) -> Iterator[None]:
    """Raise Damaged instead of an error that would come again."""
    try:
        yield
    except OSError as error:
        if error.errno in LASTING:
            raise refusal(path, error) from error
        raise


def read(path: Path, start: int = 0, most: int = LARGEST) -> bytes:
    """Read a file from a byte on. Raises Damaged where that is more than `most` bytes, and as `opened` does."""
    if is_remote(path):
        content = read_object(path, start, start + most + 1)
        refuse_large(path, len(content), most)
        return content
    with opened(path) as file:
        refuse_large(path, os.fstat(file.fileno()).st_size - start, most)
        file.seek(start)
        content = file.read(most + 1)
    refuse_large(path, len(content), most)
    return content


def read_object(path: Path, start: int, end: int) -> bytes:
    """Read a part of an object of a bucket, as far as there is one, and no byte more."""
    try:
        return storage(path).cat_file(os.fspath(path), start=start, end=end)
    except OSError as error:
        from sinklab.files.patience import status

        if status(error) == RANGE_NOT_SATISFIABLE:  # the object has no bytes from `start` on, or none at all
            return b''
        raise


def check(path: Path) -> None:
    """Refuse what stands in the place of a file that is about to be read or written; it may be missing."""
    if is_remote(path):
        return
    with contextlib.suppress(FileNotFoundError), naming_lasting_errors(path):
        refuse_irregular(path, os.stat(path))


def refusal(path: Path, error: OSError) -> Damaged:
    kind = Irregular if error.errno in WRONG_KIND else Damaged
    remedy = 'let this account read it' if isinstance(error, PermissionError) else 'mend that, or remove it'
    return kind(f'{path} cannot be read ({error.strerror}); {remedy}')


def is_lasting(error: OSError) -> bool:
    """Return whether an error comes again whenever the file is read again, a missing file included."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, *LASTING)


def refuse_irregular(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = KINDS.get(stat.S_IFMT(about.st_mode), 'no regular file')
        raise Irregular(f'{path} is {kind} where a file has to be; move it away')


def refuse_large(path: Path, size: int, most: int) -> None:
    if size > most:
        raise Irregular(
            f'{path} is damaged ({size:,} bytes, and at most {most:,} are read); bring it back or remove it'
        )
