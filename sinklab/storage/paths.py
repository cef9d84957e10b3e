"""Paths: local paths, and gs:// URLs as epath.Path with the same methods.

Also what storage reports of a path: the size and digest of objects in a bucket, and errors that a restart cannot fix.
"""

import contextlib
import dataclasses
import errno
import functools
import os
import posixpath
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import UserError, format_extra_command

os.environ['EPATH_USE_TF'] = 'false'  # otherwise etils uses TensorFlow for buckets if it is installed
# Characters of a path that Orbax or TensorStore interpret: a checkpoint at such a path cannot be restored.
UNSAVABLE_CHARS = ('*', '?', '[', '\\')
BUCKET_SCHEME = 'gs'


def parse_path(path: str | os.PathLike) -> Path:
    """Return a pathlib.Path, or an epath.Path for gs://.

    Raises:
        UserError: The URL has another scheme or no bucket, or gcsfs is not installed.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return Path(text)
    from etils import epath

    scheme, _, rest = text.partition('://')
    if scheme != BUCKET_SCHEME:
        raise UserError(f'{text} is neither local nor in a bucket that is supported; give a path or gs://')
    if not rest.strip('/'):
        raise UserError(f'{text} has no bucket; give {scheme}://BUCKET/PATH')
    register_file_system()
    return epath.Path(text.rstrip('/'))


@functools.cache
def register_file_system() -> None:
    """Make fsspec, and with it etils and Orbax, use the file system of this package for gs://."""
    import fsspec
    from etils.epath import backend

    try:
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise UserError(f'gs:// needs gcsfs; install it: {format_extra_command("gcs")}') from error
    from sinklab.storage.gcs import Storage

    for name in Storage.protocol:
        fsspec.register_implementation(name, Storage, clobber=True)
    # Private: etils caches a file system that another library has used before, and no public function clears it.
    backend.fsspec_backend._get_filesystem.cache_clear()


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a path lies in a bucket, where files are objects: complete or absent, and never appended to.

    Raises:
        UserError: The path is like gs:/bucket, which is a mistake for gs://bucket.
    """
    scheme, colon, rest = os.fspath(path).partition(':')
    if colon and scheme == BUCKET_SCHEME and not rest.startswith('//'):
        raise UserError(f'{scheme}:{rest} is not a bucket; give {scheme}://{rest.lstrip("/")}')
    return rest.startswith('//')


def get_file_system(path: Path) -> Any:
    """Return the fsspec file system of a path in a bucket; its methods take paths as text."""
    import fsspec

    return fsspec.filesystem(os.fspath(path).partition('://')[0])


def make_absolute(path: Path) -> Path:
    return path if is_remote(path) else path.absolute()


def resolve_path(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()


def check_path_readable_by_orbax(path: Path) -> None:
    """Refuse a path below which Orbax would write checkpoints that it cannot read.

    On a disk Orbax finds the files of each process with `glob` and does not escape the path, and TensorStore reads a
    backslash as a slash and accepts UTF-8 alone. In a bucket fsspec expands the same patterns.

    Args:
        path: A folder for checkpoints, relative or absolute.

    Raises:
        UserError: The absolute path has one of UNSAVABLE_CHARS, or is not UTF-8.
    """
    absolute_path = os.fspath(make_absolute(path))
    if bad_chars := [char for char in UNSAVABLE_CHARS if char in absolute_path]:
        raise UserError(
            f'{absolute_path!a} contains {" and ".join(bad_chars)}, and checkpoints saved there could not be read; '
            f'give a folder whose absolute path has none of {" ".join(UNSAVABLE_CHARS)}'
        )
    check_utf8(path, 'checkpoints could not be saved there')


def check_utf8(path: Path, consequence: str) -> None:
    """Refuse a path that is not UTF-8, which libraries that are not written in Python cannot open.

    Args:
        path: A file or folder, relative or absolute.
        consequence: What cannot be done there, for the message.

    Raises:
        UserError: The absolute path has bytes that are not UTF-8.
    """
    absolute_path = os.fspath(make_absolute(path))
    try:
        absolute_path.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f'{absolute_path!a} is not UTF-8, and {consequence}; give a folder whose absolute path is UTF-8'
        ) from error


def make_relative(path: Path, start: Path) -> str:
    """Return the path relative to `start`.

    Between a disk and a bucket, or between two buckets, it is the absolute path.
    """
    if is_remote(path) and get_bucket_url(path) == get_bucket_url(start):
        return posixpath.relpath(get_object_key(path), get_object_key(start))
    return os.fspath(make_absolute(path)) if is_remote(path) or is_remote(start) else os.path.relpath(path, start)


def join_path(start: Path, relative_path: str) -> Path:
    """Return the absolute path of a path that `make_relative` returned for `start`."""
    if is_remote(relative_path):
        return parse_path(relative_path)
    if is_remote(start) and not os.path.isabs(relative_path):
        return parse_path(
            get_bucket_url(start) + posixpath.normpath(posixpath.join(get_object_key(start), relative_path))
        )
    return Path(start, relative_path).resolve()


def find_common_folder(paths: list[Path]) -> Path:
    """Return the innermost folder that contains all paths.

    Raises:
        UserError: The paths are not all local or all in one bucket.
    """
    if not any(map(is_remote, paths)):
        return Path(os.path.commonpath(paths))
    if len({get_bucket_url(path) for path in paths}) > 1:
        raise UserError(f'{paths[0]} and {paths[-1]} have no common folder; give --out')
    return parse_path(get_bucket_url(paths[0]) + posixpath.commonpath([get_object_key(path) for path in paths]))


def get_bucket_url(path: Path) -> str:
    """Return gs://BUCKET; '' for a local path."""
    return '/'.join(os.fspath(path).split('/')[:3]) if is_remote(path) else ''


def get_object_key(path: Path) -> str:
    """Return the /FOLDER/FILE part of a path in a bucket."""
    return os.fspath(path).removeprefix(get_bucket_url(path)) or '/'


@contextlib.contextmanager
def limit_retry_seconds(seconds: float) -> Iterator[None]:
    """Limit the seconds for which requests of this thread are retried."""
    from sinklab.storage.retry import RETRY_SECONDS

    token = RETRY_SECONDS.set(seconds)
    try:
        yield
    finally:
        RETRY_SECONDS.reset(token)


CONTENT_DIGEST_KEYS = ('md5Hash', 'crc32c')  # of the metadata; the best first


@dataclasses.dataclass(frozen=True)
class ObjectInfo:
    """The size, content digest with its kind, and version of an object."""

    size: int
    content_digest: str
    version: str
    is_decompressed: bool = False  # the storage decompresses it when it is read


def parse_object_info(metadata: Mapping) -> ObjectInfo:
    content_digest = next(f'{kind} {metadata[kind]}' for kind in CONTENT_DIGEST_KEYS if metadata.get(kind))
    is_decompressed = metadata.get('contentEncoding') == 'gzip'
    return ObjectInfo(int(metadata['size']), content_digest, str(metadata['generation']), is_decompressed)


def list_objects(folder: Path, prefix: str = '') -> dict[str, ObjectInfo]:
    """Return all objects below a folder whose relative paths begin with `prefix`.

    One request lists a thousand objects.
    """
    root = os.fspath(folder).partition('://')[2] + '/'
    objects = get_file_system(folder).find(os.fspath(folder), detail=True, prefix=prefix)
    return {
        path.removeprefix(root): parse_object_info(metadata)
        for path, metadata in objects.items()
        if not path.endswith('/')
    }


# A permission, a file of another kind at the path, or a limit of this process. A restart meets the same error.
PERMANENT_ERRNOS = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP))
PERMANENT_ERRNOS |= {errno.ENAMETOOLONG, errno.EFBIG}


def is_permanent_error(error: BaseException) -> bool:
    """Return whether a storage error names a path and would occur again after a restart."""
    return isinstance(error, OSError) and error.errno in PERMANENT_ERRNOS and get_error_path(error) is not None


def get_error_path(error: BaseException) -> str | None:
    """Return the path that a storage error names; for a rename, the new path."""
    name = getattr(error, 'filename2', None) or getattr(error, 'filename', None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) and name else None


def describe_path_error(error: OSError) -> str:
    """Describe in one line what is wrong with the path that an error names, and its permissions."""
    permissions = describe_permission(get_error_path(error))
    return f'{get_error_path(error)} cannot be used ({error.strerror}{f"; {permissions}" if permissions else ""})'


def describe_permission(name: str) -> str:
    """Describe the mode and owner of a path or of its nearest folder that can be inspected.

    Returns:
        `PATH is MODE OWNER:GROUP, this process runs as USER`; '' for a bucket, or if nothing can be inspected.
    """
    if is_remote(name):
        return ''
    path = Path(os.path.abspath(name))
    for existing_path in (path, *path.parents):
        try:
            info = existing_path.lstat()
        except OSError:
            continue
        mode, owner = stat.filemode(info.st_mode), f'{get_user_name(info.st_uid)}:{info.st_gid}'
        return f'{existing_path} is {mode} {owner}, this process runs as {get_user_name(os.geteuid())}'
    return ''


def get_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
