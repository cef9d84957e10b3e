"""Paths: pathlib.Path for a disk, epath.Path for gs://, with the same methods."""

import logging
import os
import posixpath
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from sinklab.errors import UserError, format_extra_command

os.environ['EPATH_USE_TF'] = 'false'  # otherwise etils uses TensorFlow for buckets if it is installed
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')  # asks for the kind of each bucket by gRPC
BUCKET_SCHEME = 'gs://'
# Characters of a path that Orbax and fsspec interpret, so that a checkpoint at such a path cannot be restored.
PATTERN_CHARS = ('*', '?', '[', '\\')


def parse_path(path: str | os.PathLike) -> Path:
    """Return a pathlib.Path, or an epath.Path for gs://.

    Raises:
        UserError: The URL has another scheme or no bucket, or gcsfs is not installed.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return Path(text)
    from etils import epath

    if not text.startswith(BUCKET_SCHEME) or not text.removeprefix(BUCKET_SCHEME).strip('/'):
        raise UserError(f'{text} is neither a path nor in a bucket; give a path or gs://BUCKET/PATH')
    configure_gcsfs()
    return epath.Path(text.rstrip('/'))


def configure_gcsfs() -> None:
    """Set the options of gcsfs for this process, in which etils and Orbax use it as well."""
    import fsspec

    try:
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise UserError(f'gs:// needs gcsfs; install it: {format_extra_command("gcs")}') from error
    logging.getLogger('gcsfs').setLevel(logging.CRITICAL)  # it logs the errors that it raises, with tracebacks
    options = dict(use_listings_cache=False, consistency='md5')  # other processes write to the same folders
    if os.environ.get('STORAGE_EMULATOR_HOST'):
        options['token'] = 'anon'
    fsspec.config.conf['gs'] = options


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a path lies in a bucket, where files are objects: complete or absent, and never appended to.

    Raises:
        UserError: The path is like gs:/bucket, which is a mistake for gs://bucket.
    """
    text = os.fspath(path)
    if text.startswith('gs:') and not text.startswith(BUCKET_SCHEME):
        raise UserError(f'{text} is not a bucket; give gs://{text.removeprefix("gs:").lstrip("/")}')
    return '://' in text


def get_file_system() -> Any:
    """Return the fsspec file system of buckets; its methods take paths as text."""
    import fsspec

    configure_gcsfs()
    return fsspec.filesystem('gs')


def get_cache_dir() -> Path:
    """Return the cache folder of stores, models and programs: $SINKLAB_CACHE, or `sinklab` in that of the user.

    Raises:
        UserError: $SINKLAB_CACHE is a URL.
    """
    cache_dir = os.environ.get('SINKLAB_CACHE') or user_cache_dir('sinklab')
    if '://' in cache_dir:
        raise UserError(f'SINKLAB_CACHE={cache_dir} is not a local folder; set it to one')
    return Path(cache_dir)


def make_absolute(path: Path) -> Path:
    return path if is_remote(path) else path.absolute()


def resolve_path(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()


def check_checkpoint_path(path: Path) -> None:
    """Raise UserError for a folder in which the `glob` of Orbax would not find checkpoints."""
    absolute_path = os.fspath(make_absolute(path))
    if any(char in absolute_path for char in PATTERN_CHARS):
        raise UserError(
            f'checkpoints in {absolute_path!a} could not be read; give a folder whose absolute path has none of '
            f'{" ".join(PATTERN_CHARS)}'
        )


def make_relative(path: Path, start: Path) -> str:
    """Return a path relative to `start`; between a disk and a bucket, the absolute path."""
    return os.fspath(make_absolute(path)) if is_remote(path) != is_remote(start) else os.path.relpath(path, start)


def join_path(start: Path, relative_path: str) -> Path:
    """Return the absolute path of a path that `make_relative` returned for `start`."""
    if is_remote(relative_path) or os.path.isabs(relative_path):
        return parse_path(relative_path)
    if is_remote(start):
        return parse_path(posixpath.normpath(posixpath.join(start, relative_path)).replace(':/', '://', 1))
    return Path(start, relative_path).resolve()


def find_common_folder(paths: list[Path]) -> Path:
    """Return the innermost folder that contains all paths.

    Raises:
        UserError: The paths are not all local or all in a bucket.
    """
    if len({is_remote(path) for path in paths}) > 1:
        raise UserError(f'{paths[0]} and {paths[-1]} have no common folder; give --out')
    common_path = os.path.commonpath([os.fspath(path) for path in paths])
    return parse_path(common_path.replace(':/', '://', 1) if is_remote(paths[0]) else common_path)
