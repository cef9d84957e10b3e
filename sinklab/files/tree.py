"""Folders and what they hold, the same for those of a disk and for the prefixes of a bucket.

A folder of a disk gets its name when it is whole. In a bucket nothing is renamed: there a folder is whole once it has
an object COMMIT, which comes last and goes first.
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

from sinklab.files import regular
from sinklab.files.known import Known, listing
from sinklab.files.place import is_remote, storage

COMMIT = 'commit_success.txt'  # as Orbax has it
MADE = '.made'
GOING = '.deleted'  # a name in one stroke, since files go one by one
AT_ONCE = 32  # objects that are copied
PATTERN = set('*?[')  # of names that fsspec would take for patterns
ON_ERROR = 'onexc' if sys.version_info >= (3, 12) else 'onerror'  # of shutil.rmtree; the older name is deprecated
ABSENT = FileNotFoundError, NotADirectoryError, IsADirectoryError


def entries(folder: Path) -> Iterator[Path]:
    """What lies in a folder; nothing where that is not there."""
    with contextlib.suppress(FileNotFoundError):
        if not is_remote(folder):
            yield from folder.iterdir()
            return
        root = os.fspath(folder).partition('://')[2]
        for found in storage(folder).ls(os.fspath(folder), detail=False):
            if found.rstrip('/') != root:  # an object that stands for the folder, as a console makes it
                yield folder / found.rstrip('/').rpartition('/')[2]


def content(path: Path) -> bytes:
    """Of a file that may be written anew meanwhile: all of one or all of the other."""
    return regular.read(path)


def finished(folder: Path) -> list[str]:
    """The names of the folders in it that are whole."""
    if not is_remote(folder):
        with contextlib.suppress(NotADirectoryError):
            return [path.name for path in entries(folder)]
        return []
    return [path.parent.name for path in folder.glob(f'*/{COMMIT}')]


def names(folder: Path) -> list[str]:
    """Of all files of a folder, by their paths in it, as far as they are there."""
    if is_remote(folder):
        return sorted(listing(folder))

    def refuse(error: OSError) -> None:
        if not isinstance(error, ABSENT):
            raise error

    found = (Path(inner, name) for inner, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def make(folder: Path) -> None:
    """An empty folder; in a bucket, where there are none, an object that stands for it."""
    if is_remote(folder):
        (folder / MADE).write_bytes(b'')
    else:
        folder.mkdir()


def is_made(folder: Path) -> bool:
    return folder.exists() if is_remote(folder) else folder.is_dir()


def size(folder: Path) -> int:
    """Bytes of all files of a folder."""
    if is_remote(folder):
        return sum(known.size for known in listing(folder).values())
    found = (folder / name for name in names(folder))
    return sum(path.stat().st_size for path in found if path.exists())  # somebody may be taking them away


@dataclasses.dataclass(frozen=True)
class File:
    """What can be known of a file: its bytes, and what tells its content from others, as its storage says it."""

    path: Path
    length: int
    digest: Callable[[], str]

    def holds(self, digest: str) -> bool:
        """Whether its content is what had a digest, in this kind of storage or in another that it came from."""
        mine, kind = self.digest(), kind_of(digest)
        if mine == digest or kind not in HASHES:
            return mine == digest
        if kind_of(mine) == kind and '-' not in mine:  # that of S3 is one of parts, where it came in parts
            return False
        return hashed(self.path, HASHES[kind]) == digest


def files(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """Those of some files of a folder that are there."""
    if is_remote(folder):
        there = listing(folder)
        return {name: of_object(folder / name, there[name]) for name in names if name in there}
    found = {}
    for name in names:
        path = folder / name
        with contextlib.suppress(*ABSENT):
            found[name] = File(path, path.stat().st_size, functools.partial(hashed, path, HASHES['sha256']))
    return found


def of_object(path: Path, known: Known) -> File:
    return File(path, known.size, lambda: known.content)


def kind_of(digest: str) -> str:
    kind, space, _ = digest.partition(' ')
    return kind if space else 'sha256'


def hashed(path: Path, kind: tuple[str, Callable[[Any], str]]) -> str:
    name, said = kind
    with path.open('rb') as file:
        return said(hashlib.file_digest(file, name))


HASHES = {
    'sha256': ('sha256', lambda found: found.hexdigest()),
    'md5Hash': ('md5', lambda found: f'md5Hash {base64.b64encode(found.digest()).decode()}'),
    'ETag': ('md5', lambda found: f'ETag "{found.hexdigest()}"'),
}


def remove(folder: Path) -> None:
    """Delete a folder and all that it holds, if it is there; of a link, the link alone.

    Raises:
        OSError: the first error, after all that can be deleted is.
    """
    if not is_remote(folder):
        delete(folder)
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / COMMIT).unlink()
    discard(folder, names(folder))


def delete(path: Path) -> None:
    """Delete what lies at a path of a disk, and raise the first error at the end."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    errors: list[BaseException] = []

    def note(_: object, __: str, error: BaseException | tuple) -> None:
        error = error[1] if isinstance(error, tuple) else error
        if not isinstance(error, FileNotFoundError):  # another process has deleted it
            errors.append(error)

    shutil.rmtree(path, **{ON_ERROR: note})
    if errors:
        raise errors[0]


def discard(folder: Path, names: Iterable[str]) -> None:
    """Takes away some files of a folder."""
    paths = [folder / name for name in names]
    if not is_remote(folder):
        for path in paths:
            path.unlink()
        return
    at, left = storage(folder), [os.fspath(path) for path in paths]
    with contextlib.suppress(FileNotFoundError):
        if plain := [path for path in left if not PATTERN & set(path)]:
            at.rm(plain)
    for path in left:
        if PATTERN & set(path):
            at.rm_file(path)


def undo(folder: Path) -> None:
    """Have a folder, which was whole, be no longer so, in one stroke.

    On a disk it gets a name that ends with GOING and is used once: an earlier folder of this name may be left that
    could not be deleted.
    """
    with contextlib.suppress(FileNotFoundError):
        if is_remote(folder):
            (folder / GOING).write_bytes(b'')  # which tells it from a folder that never had a COMMIT
            (folder / COMMIT).unlink()
        else:
            folder.replace(folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}{GOING}'))


def move(folder: Path, to: Path) -> None:
    """Gives a folder another name; in a bucket it is copied there, and then gone."""
    if not is_remote(folder):
        folder.replace(to)
        return
    found = names(folder)
    for part in ([name for name in found if name != COMMIT], [name for name in found if name == COMMIT]):
        sources, targets = ([os.fspath(base / name) for name in part] for base in (folder, to))
        storage(folder).copy(sources, targets, batch_size=AT_ONCE)
    remove(folder)
