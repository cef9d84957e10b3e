"""Checked reads of files that others may have written: kind, size, names, JSON and .npz.

Readers raise DamagedFileError, with a message of one line that names the file. The memory that each takes is bounded.
"""

import contextlib
import errno
import io
import json
import math
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import msgspec

from sinklab.errors import UserError, format_error
from sinklab.storage.paths import PERMANENT_ERRNOS, get_file_system, is_remote

if TYPE_CHECKING:
    import numpy as np


MAX_READ_BYTES = 4 << 30  # bytes of a file that is read as a whole
RANGE_NOT_SATISFIABLE = 416  # HTTP status
FILE_KIND_NAMES = {
    stat.S_IFDIR: 'a folder',
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
    stat.S_IFLNK: 'a link',
}
# Without ENOTDIR, which means that the file is missing; with ENXIO, the error of opening a socket.
PERMANENT_READ_ERRNOS = PERMANENT_ERRNOS - {errno.ENOTDIR} | {errno.ENXIO}
WRONG_KIND_ERRNOS = errno.ELOOP, errno.EISDIR


class DamagedFileError(UserError):
    """A file is damaged. The message names it and says what to do."""


class IrregularFileError(DamagedFileError):
    """Something other than a regular file is at the path: a folder, a FIFO, a link to itself, a huge file.

    A permission that is refused is no proof of that: credentials for Kerberos or NFS expire and are renewed.
    """


@contextlib.contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its bytes.

    Raises:
        IrregularFileError: It is a folder, a FIFO, a socket or a device.
        DamagedFileError: It may not be read.
        FileNotFoundError: It does not exist.
    """
    if is_remote(path):
        with path.open('rb') as file:
            yield file
        return
    with translate_permanent_errors(path):
        check_regular_stat(path, os.stat(path))
        descriptor = open_regular_descriptor(path)
    with os.fdopen(descriptor, 'rb') as file:
        yield file


def open_regular_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of a disk without blocking.

    Raises:
        IrregularFileError: It is not a regular file.
        OSError: As os.open raises it.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # without it, opening a FIFO would block
    try:
        check_regular_stat(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def translate_permanent_errors(path: Path) -> Iterator[None]:
    """Raise DamagedFileError instead of an OSError that would occur again."""
    try:
        yield
    except OSError as error:
        if error.errno in PERMANENT_READ_ERRNOS:
            raise make_damaged_error(path, error) from error
        raise


def read_regular_file(path: Path, start: int = 0, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Read a file from byte `start` on.

    Raises:
        DamagedFileError: There are more than `max_bytes`, or `open_regular_file` raises it.
    """
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
    """Read bytes `start` to `end` of an object in a bucket, as far as they exist, and no byte more."""
    try:
        return get_file_system(path).cat_file(os.fspath(path), start=start, end=end)
    except OSError as error:
        from sinklab.storage.retry import get_http_status

        if get_http_status(error) == RANGE_NOT_SATISFIABLE:  # the object has no bytes from `start` on, or none at all
            return b''
        raise


def check_regular_file(path: Path) -> None:
    """Raise DamagedFileError if something other than a regular file is at a path; it may be missing."""
    if is_remote(path):
        return
    with contextlib.suppress(FileNotFoundError), translate_permanent_errors(path):
        check_regular_stat(path, os.stat(path))


def make_damaged_error(path: Path, error: OSError) -> DamagedFileError:
    error_class = IrregularFileError if error.errno in WRONG_KIND_ERRNOS else DamagedFileError
    remedy = 'let this account read it' if isinstance(error, PermissionError) else 'repair it, or remove it'
    return error_class(f'{path} cannot be read ({error.strerror}); {remedy}')


def is_permanent_read_error(error: OSError) -> bool:
    """Return whether an error occurs again whenever the file is read; also for a missing file."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, *PERMANENT_READ_ERRNOS)


def check_regular_stat(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = FILE_KIND_NAMES.get(stat.S_IFMT(info.st_mode), 'a special file')
        raise IrregularFileError(f'{path} is {kind} instead of a regular file; move it away')


def check_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise IrregularFileError(
            f'{path} is damaged ({size:,} bytes; at most {max_bytes:,} are allowed); restore or remove it'
        )


MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json has 40 MB, meta.json of 100,000 shards has 60 MB
MAX_JSON_DEPTH = 64  # levels of nesting
MAX_ARRAY_BYTES = 16 << 30  # of all arrays of an .npz
MAX_DEFLATE_RATIO = 1100  # maximum bytes that one byte of a deflated file expands to
HUB_REPOSITORY_PREFIXES = ('models--', 'datasets--', 'spaces--')  # of a folder of Hugging Face's hub cache
DEFAULT_REMEDY = 'download it again'
T = TypeVar('T')


def check_relative_name(name: Any, file: str | os.PathLike) -> str:
    """Return a name that was read from a file, if it is a relative path below the folder of that file.

    Args:
        name: One or several components with / between them; none may be empty, `.` or `..`.
        file: The file that the name was read from.

    Raises:
        DamagedFileError: The name is no text, or absolute, or leads out of the folder, or has a backslash or a
            control character.
    """
    if not is_relative_name(name):
        raise DamagedFileError(
            f'{file} names {str(name)[:80]!a}, which is not a relative path inside its folder; {DEFAULT_REMEDY}'
        )
    return name


def is_relative_name(name: Any) -> bool:
    """Return whether a name passes `check_relative_name`."""
    if not isinstance(name, str) or not name.isprintable() or '\\' in name:
        return False
    return not any(part in ('', '.', '..') for part in name.split('/'))


def resolve_name(folder: Path, name: Any, file: str | os.PathLike) -> Path:
    """Return the path below a folder of a name that was read from a file.

    Raises:
        DamagedFileError: `check_relative_name` refuses the name; or the name, or a folder above it, is a link that
            leads out of the folder.
    """
    path = folder / check_relative_name(name, file)
    if not is_linked_outside(path, folder):
        return path
    raise DamagedFileError(
        f'{file} names {name}, a link to {path.resolve()}, outside of {folder}; replace it with a copy'
    )


def is_linked_outside(path: Path, folder: Path) -> bool:
    """Return whether links of a path below a folder lead out of it.

    The snapshots of Hugging Face's hub cache consist of links to `blobs` of the same repository; these stay inside.
    """
    if is_remote(path):  # buckets have no links
        return False
    resolved_path, resolved_folder = path.resolve(), folder.resolve()
    allowed_folders = [
        resolved_folder,
        *(parent for parent in resolved_folder.parents if parent.name.startswith(HUB_REPOSITORY_PREFIXES)),
    ]
    return not any(resolved_path.is_relative_to(allowed) for allowed in allowed_folders)


def read_json(path: Path, schema: type[T] = dict, max_bytes: int = MAX_JSON_BYTES, remedy: str = DEFAULT_REMEDY) -> T:
    """Return the content of a JSON file, converted to a type by `msgspec.convert`.

    Args:
        path: A local file, or one in a bucket.
        schema: `dict`, or a type with its fields: a TypedDict, a dataclass, a msgspec.Struct.
        max_bytes: The maximum size in bytes.
        remedy: What to do if the file is damaged, for the message.

    Raises:
        OSError: It does not exist, or its disk or bucket does not respond, which is no fault of the file.
        DamagedFileError: It is no regular file, too large, too deeply nested, no UTF-8, no JSON or of another type.
    """
    return parse_json(read_regular_file(path, max_bytes=max_bytes), path, schema, remedy)


def parse_json(content: bytes, name: str | os.PathLike, schema: type[T] = dict, remedy: str = DEFAULT_REMEDY) -> T:
    """Parse a JSON text as `read_json` does; `name` is its origin, for messages."""
    try:
        return msgspec.convert(decode_json(content), schema)
    except msgspec.ValidationError as error:
        raise DamagedFileError(f'{name} is damaged ({error}); {remedy}') from error
    except ValueError as error:
        raise DamagedFileError(f'{name} is damaged and cannot be read ({str(error)[:160]}); {remedy}') from error


def decode_json(content: bytes | str, max_depth: int = MAX_JSON_DEPTH, finite: bool = False) -> Any:
    """Decode JSON as plain objects.

    Args:
        content: A text, or its bytes in UTF-8.
        max_depth: The maximum depth of nested objects and lists.
        finite: Whether NaN, infinities and numbers that are too large for float64 are refused.

    Raises:
        ValueError: It is no UTF-8, no JSON, nested too deeply, or has a number that is refused.
    """
    text = content.decode('utf-8') if isinstance(content, bytes) else content
    number_hooks: dict[str, Any] = (
        dict(parse_constant=reject_constant, parse_float=parse_finite_number) if finite else {}
    )
    try:
        # json and not msgspec, which refuses lone surrogates: names of files that are not UTF-8 have them.
        decoded = json.loads(text, **number_hooks)
        check_depth(decoded, max_depth)
    except RecursionError:
        raise ValueError(f'nested more than {max_depth} levels deep') from None
    return decoded


def reject_constant(text: str) -> None:
    raise ValueError(f'{text} is not a number of JSON')


def parse_finite_number(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f'{text[:20]} is too large a number')
    return number


def check_depth(decoded: Any, max_depth: int) -> None:
    """Raise RecursionError if lists and objects are nested more than `max_depth` levels deep."""
    level: Iterable[Any] = [decoded]
    for _ in range(max_depth + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    raise RecursionError


ARCHIVE_ERRORS = (
    *(ValueError, EOFError, KeyError, TypeError, IndexError, OverflowError, RuntimeError, SyntaxError, MemoryError),
    *(NotImplementedError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


def load_npz(
    content: Path | bytes,
    name: str | os.PathLike = '',
    remedy: str = DEFAULT_REMEDY,
    names: Collection[str] | None = None,
    max_bytes: float = 0,
) -> 'dict[str, np.ndarray]':
    """Load arrays of an .npz; check their headers before anything is allocated, and load no pickles.

    Args:
        content: A path, local or in a bucket, or the bytes of a file.
        name: The name of the file, if bytes are given.
        remedy: What to do if the file is damaged, for the message.
        names: The names of the arrays to load; those that do not exist are left out. None: all arrays.
        max_bytes: The maximum bytes of these arrays together; 0: MAX_ARRAY_BYTES.

    Raises:
        OSError: It does not exist, or its disk or bucket does not respond.
        DamagedFileError: It is no .npz, or an array claims other bytes than its member of the archive has.
    """
    max_bytes = max_bytes or MAX_ARRAY_BYTES
    with open_npz(content, name or os.fspath(content), remedy) as (archive, members):
        selected = members if names is None else [key for key in names if key in members]
        if sum(members[key].file_size for key in selected) > max_bytes:
            raise ValueError(f'it unpacks to more than {max_bytes:,} bytes')
        return {key: read_array(archive, members[key], key) for key in selected}


def list_npz_arrays(path: Path, remedy: str = DEFAULT_REMEDY) -> list[str]:
    """Return the names of the arrays of an .npz, of which none is read.

    Raises:
        OSError: It does not exist, or its disk or bucket does not respond.
        DamagedFileError: It is no .npz.
    """
    with open_npz(path, os.fspath(path), remedy) as (_, members):
        return list(members)


@contextlib.contextmanager
def open_npz(
    content: Path | bytes, name: str | os.PathLike, remedy: str
) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Open an .npz, and yield the archive and its members by the name of the array; translate errors of damage."""
    try:
        with (
            io.BytesIO(content) if isinstance(content, bytes) else open_regular_file(content) as file,
            zipfile.ZipFile(file) as archive,
        ):
            yield archive, {entry.filename.removesuffix('.npy'): entry for entry in archive.infolist()}
    except (*ARCHIVE_ERRORS, OSError) as error:
        # zipfile raises BadZipFile if a disk does not respond. EINVAL: a seek before the start of a damaged file.
        cause = error.__context__ if isinstance(error, zipfile.BadZipFile) else error
        if isinstance(cause, OSError) and cause.errno != errno.EINVAL:
            raise cause from None
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(
            f'{name} is damaged or an incomplete .npz ({format_error(error)}); {remedy}'
        ) from error


def read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> 'np.ndarray':
    """Read one array of an .npz.

    The size in its header is compared with the bytes of the archive member before anything is allocated.
    """
    import numpy as np

    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f'{name} has a compression that NumPy does not use')
    if entry.file_size > MAX_DEFLATE_RATIO * (entry.compress_size + 64):
        raise ValueError(f'{name} claims {entry.file_size:,} bytes, decompressed from {entry.compress_size:,}')
    with archive.open(entry) as member:
        version = np.lib.format.read_magic(member)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in headers:
            raise ValueError(f'{name} has version {version} of the NumPy format')
        shape, in_fortran_order, dtype = headers[version](member)
        if dtype.hasobject:
            raise ValueError(f'{name} contains Python objects, which are never loaded')
        size = math.prod(shape) * dtype.itemsize
        if size != entry.file_size - member.tell():
            raise ValueError(f'{name} has another size than its shape {shape} of {dtype} needs')
        content = member.read(size) + member.read(1)  # the read at the end verifies the checksum
        if len(content) != size:
            raise ValueError(f'{name} has {len(content):,} of {size:,} bytes')
    flat_array = np.frombuffer(bytearray(content), dtype)
    return flat_array.reshape(shape, order='F' if in_fortran_order else 'C')
