"""Where a file lies: a local path, or one in a bucket with the same methods."""

import contextlib
import functools
import importlib
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinklab.install import format_extra_command
from sinklab.record import Refusal

os.environ['EPATH_USE_TF'] = 'false'  # or etils would have TensorFlow reach buckets, where that is installed
# Characters of a path that Orbax or TensorStore read as something else: a checkpoint there cannot be restored.
UNSAVABLE = ('*', '?', '[', '\\')
# (the library that is needed, the extra that brings it and the file here that holds a Storage of it)
BUCKETS = {'gs': ('gcsfs', 'gcs'), 's3': ('s3fs', 's3')}


def place(given: str | os.PathLike) -> Path:
    """A pathlib.Path, or an epath.Path for gs:// and s3://."""
    path = os.fspath(given)
    if not is_remote(path):
        return Path(path)
    from etils import epath

    scheme, _, rest = path.partition('://')
    if scheme not in BUCKETS:
        raise Refusal(f'{path} is neither local nor in a bucket that is known here; give a path, gs:// or s3://')
    if not rest.strip('/'):
        raise Refusal(f'{path} names no bucket; give {scheme}://BUCKET/PATH')
    register(scheme)
    return epath.Path(path.rstrip('/'))


@functools.cache
def register(scheme: str) -> None:
    """Make fsspec, and with it etils and Orbax, use the file system of this package for a scheme of URLs."""
    import fsspec
    from etils.epath import backend

    library, extra = BUCKETS[scheme]
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise Refusal(f'{scheme}:// needs {library}; install it: {format_extra_command(extra)}') from error
    kind = importlib.import_module(f'sinklab.files.{extra}').Storage
    for name in kind.protocol:
        fsspec.register_implementation(name, kind, clobber=True)
    # etils keeps a file system that another library (tensorflow_datasets) has used before. Nothing public forgets it.
    backend.fsspec_backend._get_filesystem.cache_clear()


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a path lies in a bucket, where files are objects: complete or absent, and never appended to.

    Raises:
        Refusal: the path is like gs:/bucket, which is a mistake for gs://bucket.
    """
    scheme, colon, rest = os.fspath(path).partition(':')
    if colon and scheme in BUCKETS and not rest.startswith('//'):
        raise Refusal(f'{scheme}:{rest} is no bucket; give {scheme}://{rest.lstrip("/")}')
    return rest.startswith('//')


def storage(path: Path) -> Any:
    """The fsspec file system of a path in a bucket; paths are given to it as text."""
    import fsspec

    return fsspec.filesystem(os.fspath(path).partition('://')[0])


def absolute(path: Path) -> Path:
    return path if is_remote(path) else path.absolute()


def resolved(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()


def check_checkpoint_path(path: Path) -> None:
    """Refuse a path below which Orbax would write checkpoints that it cannot read.

    On a disk Orbax finds the files of each process with `glob` and does not escape the path, and TensorStore reads a
    backslash as a slash and accepts UTF-8 alone. In a bucket fsspec expands the same patterns.

    Args:
        path: a folder that checkpoints are to be saved in, relative or absolute.

    Raises:
        Refusal: the absolute path has one of these characters.
    """
    whole = os.fspath(absolute(path))
    if bad := [letter for letter in UNSAVABLE if letter in whole]:
        raise Refusal(
            f'{whole!a} has {" and ".join(bad)} in it, and checkpoints saved there could not be read; '
            f'give a folder whose absolute path has none of {" ".join(UNSAVABLE)}'
        )
    check_utf8(path, 'checkpoints could not be saved there')


def check_utf8(path: Path, why: str) -> None:
    """Refuse a path that is not UTF-8, which libraries that are not written in Python cannot open.

    Args:
        path: a file or folder, relative or absolute.
        why: what cannot be done there.

    Raises:
        Refusal: the absolute path has bytes that are not UTF-8.
    """
    whole = os.fspath(absolute(path))
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f'{whole!a} is not UTF-8, and {why}; give a folder whose absolute path is UTF-8') from error


def relative(path: Path, start: Path) -> str:
    """The way from one folder to another; in whole, where there is none from a disk to a bucket."""
    if is_remote(path) and bucket(path) == bucket(start):
        return posixpath.relpath(key(path), key(start))
    return os.fspath(absolute(path)) if is_remote(path) or is_remote(start) else os.path.relpath(path, start)


def joined(start: Path, way: str) -> Path:
    """Return the path that `relative` has expressed as a way from a folder."""
    if is_remote(way):
        return place(way)
    if is_remote(start) and not os.path.isabs(way):
        return place(bucket(start) + posixpath.normpath(posixpath.join(key(start), way)))
    return Path(start, way).resolve()


def common(paths: list[Path]) -> Path:
    """The innermost folder that all of them lie in."""
    if not any(map(is_remote, paths)):
        return Path(os.path.commonpath(paths))
    if len({bucket(path) for path in paths}) > 1:
        raise Refusal(f'{paths[0]} and {paths[-1]} lie in no folder together; give --out')
    return place(bucket(paths[0]) + posixpath.commonpath([key(path) for path in paths]))


def bucket(path: Path) -> str:
    """gs://BUCKET; nothing of a local path."""
    return '/'.join(os.fspath(path).split('/')[:3]) if is_remote(path) else ''


def key(path: Path) -> str:
    """/FOLDER/FILE of a path in a bucket."""
    return os.fspath(path).removeprefix(bucket(path)) or '/'


@contextlib.contextmanager
def hasty(seconds: float) -> Iterator[None]:
    """For a request of this thread that nobody should wait for longer than that."""
    from sinklab.files.patience import PATIENCE

    token = PATIENCE.set(seconds)
    try:
        yield
    finally:
        PATIENCE.reset(token)
