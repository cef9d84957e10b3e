"""Regular files, read so that nothing can hang: what stands in the place of one is named and not opened."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sinklab.files.place import is_remote, get_file_system
from sinklab.record import UserError

MAX_READ_BYTES = 4 << 30  # bytes of a file that is read as a whole
RANGE_NOT_SATISFIABLE = 416  # of HTTP
FILE_KIND_NAMES = {
    stat.S_IFDIR: 'a folder',
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
}
# Errors that a command meets again if it is started again, unlike those of a disk that does not answer.
LASTING_ERRNOS = errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EISDIR
WRONG_KIND_ERRNOS = errno.ELOOP, errno.EISDIR


class DamagedFileError(UserError):
    """A file is not what it has to be. The message names it, and says what to do."""


class IrregularFileError(DamagedFileError):
    """Something else stands in the place of the file: a folder, a FIFO, a link to itself, a far larger file.

    A permission that is refused is no proof of that: credentials for Kerberos or NFS expire and are renewed.
    """


@contextlib.contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
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
    with translate_lasting_errors(path):
        check_regular_stat(path, os.stat(path))
        descriptor = open_regular_descriptor(path)
    with os.fdopen(descriptor, 'rb') as file:
        yield file


def open_regular_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of a disk without waiting. Raises Damaged for what is none, and OSError as os.open does."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # a FIFO would be waited for without it
    try:
        check_regular_stat(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def translate_lasting_errors(path: Path) -> Iterator[None]:
    """Raise Damaged instead of an error that would come again."""
    try:
        yield
    except OSError as error:
        if error.errno in LASTING_ERRNOS:
            raise make_damaged_error(path, error) from error
        raise


def read_regular_file(path: Path, start: int = 0, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Read a file from a byte on. Raises Damaged where that is more than `most` bytes, and as `opened` does."""
    if is_remote(path):
        content = read_object_range(path, start, start + max_bytes + 1)
        check_size(path, len(content), max_bytes)
        return content
    with open_regular_file(path) as file:
        check_size(path, os.fstat(file.fileno()).st_size - start, max_bytes)
        file.seek(start)
        content = file.read(max_bytes + 1)
    check_size(path, len(content), max_bytes)
    return content


def read_object_range(path: Path, start: int, end: int) -> bytes:
    """Read a part of an object of a bucket, as far as there is one, and no byte more."""
    try:
        return get_file_system(path).cat_file(os.fspath(path), start=start, end=end)
    except OSError as error:
        from sinklab.files.patience import get_http_status

        if get_http_status(error) == RANGE_NOT_SATISFIABLE:  # the object has no bytes from `start` on, or none at all
            return b''
        raise


def check_regular_file(path: Path) -> None:
    """Refuse what stands in the place of a file that is about to be read or written; it may be missing."""
    if is_remote(path):
        return
    with contextlib.suppress(FileNotFoundError), translate_lasting_errors(path):
        check_regular_stat(path, os.stat(path))


def make_damaged_error(path: Path, error: OSError) -> DamagedFileError:
    error_class = IrregularFileError if error.errno in WRONG_KIND_ERRNOS else DamagedFileError
    remedy = 'let this account read it' if isinstance(error, PermissionError) else 'mend that, or remove it'
    return error_class(f'{path} cannot be read ({error.strerror}); {remedy}')


def is_lasting_error(error: OSError) -> bool:
    """Return whether an error comes again whenever the file is read again, a missing file included."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, *LASTING_ERRNOS)


def check_regular_stat(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = FILE_KIND_NAMES.get(stat.S_IFMT(info.st_mode), 'no regular file')
        raise IrregularFileError(f'{path} is {kind} where a file has to be; move it away')


def check_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise IrregularFileError(
            f'{path} is damaged ({size:,} bytes, and at most {max_bytes:,} are read); bring it back or remove it'
        )
