"""Directories: listing, copying, deleting and digests, on a disk or below the prefix of a bucket.

On a disk a folder gets its name when it is complete. In a bucket nothing can be renamed: there a folder is complete
once it has the object COMMIT_MARKER, which is written last and deleted first.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sinklab.storage.paths import (
    ObjectInfo,
    get_file_system,
    is_remote,
    list_objects,
)

COMMIT_MARKER = 'commit_success.txt'  # the name that Orbax uses
FOLDER_MARKER = '.made'
DELETED_SUFFIX = '.deleted'  # a folder is renamed atomically, whereas its files are deleted one by one
COPY_BATCH_SIZE = 32  # objects that are copied at a time
GLOB_CHARS = set('*?[')  # fsspec would take a name with one of these for a pattern
RMTREE_ERROR_ARG = (
    'onexc' if sys.version_info >= (3, 12) else 'onerror'
)  # of shutil.rmtree; the older name is deprecated
ABSENT_ERRORS = FileNotFoundError, NotADirectoryError, IsADirectoryError


def list_entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if not is_remote(folder):
            yield from folder.iterdir()
            return
        root = os.fspath(folder).partition('://')[2]
        for name in get_file_system(folder).ls(os.fspath(folder), detail=False):
            if name.rstrip('/') != root:  # an object that stands for the folder; web consoles create it
                yield folder / name.rstrip('/').rpartition('/')[2]


def list_committed(folder: Path) -> list[str]:
    """Return the names of the committed folders in a folder.

    On a disk these are all entries, since a folder gets its name when it is complete.
    """
    if not is_remote(folder):
        with contextlib.suppress(NotADirectoryError):
            return [path.name for path in list_entries(folder)]
        return []
    return [path.parent.name for path in folder.glob(f'*/{COMMIT_MARKER}')]


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files below a folder; none if it does not exist."""
    if is_remote(folder):
        return sorted(list_objects(folder))

    def raise_unless_absent(error: OSError) -> None:
        if not isinstance(error, ABSENT_ERRORS):
            raise error

    file_paths = (
        Path(parent, name) for parent, _, names in os.walk(folder, onerror=raise_unless_absent) for name in names
    )
    return sorted(path.relative_to(folder).as_posix() for path in file_paths)


def make_folder(folder: Path) -> None:
    """Create a folder; in a bucket, which has no folders, create an object that stands for it."""
    if is_remote(folder):
        (folder / FOLDER_MARKER).write_bytes(b'')
    else:
        folder.mkdir()


def is_folder(folder: Path) -> bool:
    return folder.exists() if is_remote(folder) else folder.is_dir()


def compute_size(folder: Path) -> int:
    """Return the size in bytes of all files below a folder."""
    if is_remote(folder):
        return sum(info.size for info in list_objects(folder).values())
    file_paths = (folder / name for name in list_files(folder))
    return sum(path.stat().st_size for path in file_paths if path.exists())  # another process may be deleting them


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """The size and the content digest of a file, as its storage reports them."""

    path: Path
    size: int
    get_digest: Callable[[], str]

    def has_digest(self, digest: str) -> bool:
        """Return whether the content has a digest that this or another kind of storage reported."""
        own_digest, kind = self.get_digest(), get_digest_kind(digest)
        if own_digest == digest or kind not in DIGEST_FORMATS:
            return own_digest == digest
        if get_digest_kind(own_digest) == kind:
            return False
        return hash_file(self.path, DIGEST_FORMATS[kind]) == digest


def get_stored_files(folder: Path, names: Iterable[str]) -> dict[str, StoredFile]:
    """Return the named files of a folder that exist, by name."""
    if is_remote(folder):
        objects = list_objects(folder)
        return {name: make_stored_file(folder / name, objects[name]) for name in names if name in objects}
    stored_files = {}
    for name in names:
        path = folder / name
        with contextlib.suppress(*ABSENT_ERRORS):
            stored_files[name] = StoredFile(
                path, path.stat().st_size, functools.partial(hash_file, path, DIGEST_FORMATS['sha256'])
            )
    return stored_files


def make_stored_file(path: Path, info: ObjectInfo) -> StoredFile:
    return StoredFile(path, info.size, lambda: info.content_digest)


def get_digest_kind(digest: str) -> str:
    kind, space, _ = digest.partition(' ')
    return kind if space else 'sha256'


def hash_file(path: Path, digest_format: tuple[str, Callable[[Any], str]]) -> str:
    algorithm, format_digest = digest_format
    with path.open('rb') as file:
        return format_digest(hashlib.file_digest(file, algorithm))


DIGEST_FORMATS = {
    'sha256': ('sha256', lambda found: found.hexdigest()),
    'md5Hash': ('md5', lambda found: f'md5Hash {base64.b64encode(found.digest()).decode()}'),
}


def remove_folder(folder: Path) -> None:
    """Delete a folder and its content if it exists; of a symbolic link, delete the link alone.

    Raises:
        OSError: The first error, after all that can be deleted is deleted.
    """
    if not is_remote(folder):
        delete_local_path(folder)
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / COMMIT_MARKER).unlink()
    remove_files(folder, list_files(folder))


def delete_local_path(path: Path) -> None:
    """Delete a local file or folder; raise the first error after all that can be deleted is deleted."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    errors: list[BaseException] = []

    def collect_error(_: object, __: str, error: BaseException | tuple) -> None:
        error = error[1] if isinstance(error, tuple) else error
        if not isinstance(error, FileNotFoundError):  # another process has deleted it
            errors.append(error)

    shutil.rmtree(path, **{RMTREE_ERROR_ARG: collect_error})
    if errors:
        raise errors[0]


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete some files of a folder."""
    paths = [folder / name for name in names]
    if not is_remote(folder):
        for path in paths:
            path.unlink()
        return
    file_system, urls = get_file_system(folder), [os.fspath(path) for path in paths]
    with contextlib.suppress(FileNotFoundError):
        if plain_urls := [path for path in urls if not GLOB_CHARS & set(path)]:
            file_system.rm(plain_urls)
    for path in urls:
        if GLOB_CHARS & set(path):
            file_system.rm_file(path)


def mark_deleted(folder: Path) -> None:
    """Mark a committed folder as deleted, atomically.

    On a disk the folder gets a unique name that ends with DELETED_SUFFIX, since a folder of the same name that could
    not be deleted may be left from before.
    """
    with contextlib.suppress(FileNotFoundError):
        if is_remote(folder):
            (folder / DELETED_SUFFIX).write_bytes(b'')  # distinguishes it from a folder that was never committed
            (folder / COMMIT_MARKER).unlink()
        else:
            folder.replace(folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}{DELETED_SUFFIX}'))


def move_folder(folder: Path, target: Path) -> None:
    """Move a folder; in a bucket it is copied, the commit marker last, and then deleted."""
    if not is_remote(folder):
        folder.replace(target)
        return
    file_names = list_files(folder)
    for batch in (
        [name for name in file_names if name != COMMIT_MARKER],
        [name for name in file_names if name == COMMIT_MARKER],
    ):
        sources, targets = ([os.fspath(root / name) for name in batch] for root in (folder, target))
        get_file_system(folder).copy(sources, targets, batch_size=COPY_BATCH_SIZE)
    remove_folder(folder)
