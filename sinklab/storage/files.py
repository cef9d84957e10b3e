"""Files and folders on a disk or in a bucket: checked reads, atomic writes, listing, moving and deleting."""

import contextlib
import functools
import hashlib
import os
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from etils import epath

from sinklab.errors import UserError, format_error, print_status
from sinklab.storage.paths import get_file_system, is_remote

if TYPE_CHECKING:
    import numpy as np

TEMPORARY_SUFFIX = '.unfinished'
SHARED_DISK_SECONDS = 5.0  # seconds until a network file system shows a new file on all hosts
RESTORE_REMEDY = 'restore it from a copy, or use another folder'
T = TypeVar('T')


class DamagedFileError(UserError):
    """A file is not what its name says. The message names it and says what to do."""


def read_json(path: Path, schema: Any = dict, remedy: str = RESTORE_REMEDY) -> Any:
    """Read a JSON file as plain objects, checked against a schema.

    Args:
        path: A local file, or one in a bucket.
        schema: A type that `msgspec.convert` accepts, such as a TypedDict or a msgspec.Struct.
        remedy: What to do if the file is damaged, for the message.

    Raises:
        OSError: It does not exist, or its disk or bucket does not respond.
        DamagedFileError: It is no JSON, has infinities or NaN, or does not match the schema.
    """
    try:
        decoded = msgspec.json.decode(path.read_bytes())
        msgspec.convert(decoded, schema)
    except IsADirectoryError as error:
        raise DamagedFileError(f'{path} is a folder instead of a file; move it away') from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DamagedFileError(f'{path} is damaged ({format_error(error).replace("`", "")}); {remedy}') from error
    return decoded


def read_arrays(
    path: Path, names: Collection[str] | None = None, remedy: str = RESTORE_REMEDY
) -> 'dict[str, np.ndarray]':
    """Read arrays of an .npz, without pickles.

    Args:
        path: A local file, or one in a bucket.
        names: The names of the arrays to read; those that do not exist are left out. None: all arrays.
        remedy: What to do if the file is damaged, for the message.

    Raises:
        OSError: It does not exist, or its disk or bucket does not respond.
        DamagedFileError: It is no .npz, or has an array of Python objects.
    """
    import numpy as np

    try:
        with path.open('rb') as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if names is None or name in names}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedFileError(f'{path} is damaged ({format_error(error)}); {remedy}') from error


@functools.cache
def warn_once(message: str) -> None:
    """Print a warning on stderr, once per process."""
    print_status(f'sinklab: {message}')


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write, which is renamed to `path`, or uploaded there, once it is complete."""
    if is_remote(path):
        with tempfile.TemporaryDirectory() as temporary_dir:
            yield (local_path := Path(temporary_dir, path.name))
            get_file_system().put_file(os.fspath(local_path), os.fspath(path))
        return
    temporary_path = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}')
    try:
        yield temporary_path
        with temporary_path.open('rb') as file:
            os.fsync(file.fileno())
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary_path:
        temporary_path.write_text(text, encoding='utf-8')


@contextlib.contextmanager
def open_writable_folder(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and turn errors of writing there into a UserError.

    Raises:
        UserError: The folder cannot be created or written: a full disk, a missing permission, a file at the path.
    """
    try:
        if not is_remote(folder):  # a bucket has no folders
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or format_error(error)
        raise UserError(
            f'{folder} cannot be written ({reason}); make room or access there, or give another'
        ) from error


def list_entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if it does not exist."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_file_infos(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the metadata of all files below a folder by relative path: `size`, and in a bucket its digests.

    It is empty if the folder does not exist.
    """
    if is_remote(folder):
        root = os.fspath(folder).partition('://')[2] + '/'
        infos = get_file_system().find(os.fspath(folder), detail=True)
        return {name.removeprefix(root): info for name, info in infos.items() if not name.endswith('/')}
    paths = [
        Path(parent, name) for parent, _, names in os.walk(folder, onerror=raise_unless_missing) for name in names
    ]
    return {path.relative_to(folder).as_posix(): dict(size=path.stat().st_size) for path in paths if path.exists()}


def raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a local file."""
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def remove_folder(folder: Path) -> None:
    """Delete a folder and its content, if it exists."""
    epath.Path(folder).rmtree(missing_ok=True)


def poll_until(read: Callable[[], T]) -> T:
    """Call `read` until it returns a true value, for at most SHARED_DISK_SECONDS; return the last value.

    A network file system may show a file late.
    """
    deadline = time.monotonic() + SHARED_DISK_SECONDS
    while not (result := read()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result
