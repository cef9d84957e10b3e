"""Orbax contexts for local and remote checkpoints, and translation of Orbax errors."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint.log_filters import suppress_orbax_logs
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
from sinklab.storage.paths import is_remote
from sinklab.storage.permanent_errors import PERMANENT_ERRNOS, describe_permission, get_error_path
from sinklab.storage.retry import StorageTimeoutError

TEMPORARY_SUFFIX = '.orbax-checkpoint-tmp'  # in the name of an unfinished save
REGION_VARIABLES = 'AWS_REGION', 'AWS_DEFAULT_REGION'
# Errors that do not concern the files of a checkpoint.
UNRELATED_ERRORS = (
    UserError,
    MemoryError,
    PermissionError,
    TimeoutError,
    StorageTimeoutError,
    jax.errors.JaxRuntimeError,
)


@contextlib.contextmanager
def shorten_read_errors(path: Path) -> Iterator[None]:
    """Translate errors of reading a checkpoint into a UserError of one line.

    Orbax's own messages have thousands of characters.
    """
    try:
        with suppress_orbax_logs():
            yield
    except UNRELATED_ERRORS:
        raise
    except Exception as error:  # of any type: it depends on what is wrong with a file
        raise UserError(
            f'{path} cannot be read ({describe_root_cause(error)}); it is of another version, or has changed since '
            'it was verified: see sinklab checkpoint verify'
        ) from error


@contextlib.contextmanager
def use_orbax_context(path: Path) -> Iterator[None]:
    """Use an Orbax context that makes directories before it starts threads, and that supports buckets.

    Threads that Orbax starts before it makes directories wait 300 s for a directory that cannot be made, and the
    process cannot exit in the meantime. Nothing is renamed in a bucket: a save there ends with a commit file.
    """
    context = ocp.Context()
    context.async_options.create_directories_asynchronously = False
    if is_remote(path):
        if str(path).startswith('s3://'):
            patch_orbax_for_s3()
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    with context:
        yield


def patch_orbax_for_s3() -> None:
    """Patch Orbax for s3:// paths; by itself it uses the TensorStore drivers of disks and gs:// only."""
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if tensorstore_utils._use_gcs_driver is is_bucket_path:
        return
    normalize_path, get_gcs_driver = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs
    tensorstore_utils._use_gcs_driver = is_bucket_path
    tensorstore_utils._normalize_path = lambda path: normalize_path(path).replace('s3:/', 's3://')
    gcs_utils.get_kvstore_for_gcs = lambda path: (
        make_s3_driver(path) if path.startswith('s3://') else get_gcs_driver(path)
    )


def is_bucket_path(directory: str) -> bool:
    return directory.startswith(('gs://', 's3://'))


def make_s3_driver(path: str) -> dict[str, Any]:
    """Make the TensorStore driver spec of an s3:// path, with endpoint and region from AWS variables."""
    bucket, _, key = path.removeprefix('s3://').partition('/')
    options = dict(
        endpoint=get_variable('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL'), aws_region=get_variable(*REGION_VARIABLES)
    )
    if get_variable('AWS_ACCESS_KEY_ID'):  # do not try other sources, with a warning about each
        options['aws_credentials'] = {'type': 'environment'}
    return dict(driver='s3', bucket=bucket, path=key) | {name: value for name, value in options.items() if value}


def get_variable(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def describe_root_cause(error: BaseException) -> str:
    """Return the first line of the root cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return f'{type(error).__name__}: {" ".join(str(error).split())[:160]}'


RERUN_HINT = 'and run the same command again: its last whole checkpoint is intact'
DISK_FULL_MESSAGE = f'no room is left on the disk of {{folder}}; make room {RERUN_HINT}'
ACCESS_MESSAGE = f'{{folder}} can no longer be read or written ({{error}}){{seen}}; make it accessible {RERUN_HINT}'
MISSING_MESSAGE = '{folder} is no longer there; bring it back and run the same command again'
OUTPUT_DISK_FULL_MESSAGE = (
    'no room is left on the disk of {folder}; make room and run the same command again, or choose another folder'
)
OUTPUT_ACCESS_MESSAGE = '{folder} cannot be written ({error}){seen}; make it accessible, or choose another folder'
# Each sign is an errno, or a text in messages of Orbax, whose errors have no errno.
DISK_FULL_SIGNS = (errno.ENOSPC, errno.EDQUOT, 'RESOURCE_EXHAUSTED', 'No space left', 'quota exceeded')
ACCESS_SIGNS = (*PERMANENT_ERRNOS, 'Read-only file system', 'PERMISSION_DENIED', 'Permission denied')
ACCESS_SIGNS += ('Operation not permitted', 'Not a directory', 'Is a directory', 'Too many levels of symbolic links')
ACCESS_SIGNS += ('File too large', 'File name too long')


@contextlib.contextmanager
def translate_storage_errors(run_dir: RunDir, saving_path: Path | None = None) -> Iterator[None]:
    """Translate errors of the storage of a run directory into a UserError.

    While it saves, Orbax raises other errors of the storage as ValueError. With `saving_path` these become OSError.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if message := select_message(run_dir, error):
            raise UserError(
                message.format(folder=run_dir, error=format_error(error), seen=describe_error_permission(error))
            ) from error
        if saving_path and isinstance(error, ValueError):
            raise OSError(f'{saving_path} could not be saved ({describe_root_cause(error)})') from error
        raise


@contextlib.contextmanager
def translate_write_errors(output_path: Path) -> Iterator[None]:
    """Translate errors of the disk of a new output directory into a UserError.

    Raises:
        UserError: The disk is full, or the directory is not writable.
        OSError: Orbax could not write the directory for another reason.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if has_sign(error, DISK_FULL_SIGNS):
            raise UserError(OUTPUT_DISK_FULL_MESSAGE.format(folder=output_path)) from error
        if has_sign(error, ACCESS_SIGNS):
            raise UserError(
                OUTPUT_ACCESS_MESSAGE.format(
                    folder=output_path, error=format_error(error), seen=describe_error_permission(error)
                )
            ) from error
        if isinstance(error, ValueError):
            raise OSError(f'{output_path} could not be written ({describe_root_cause(error)})') from error
        raise


def select_message(run_dir: RunDir, error: Exception) -> str | None:
    """Return the message for an error; None if it does not concern the directory."""
    file = get_error_path(error)
    if file is not None and not is_inside(file, run_dir.path):
        return None
    if has_sign(error, DISK_FULL_SIGNS):
        return DISK_FULL_MESSAGE
    if has_sign(error, ACCESS_SIGNS):
        return ACCESS_MESSAGE
    is_missing = getattr(error, 'errno', None) == errno.ENOENT or 'NOT_FOUND' in str(error)
    return MISSING_MESSAGE if is_missing and not run_dir.checkpoint_dir.exists() else None


def has_sign(error: Exception, signs: tuple[int | str, ...]) -> bool:
    """Return whether an error has one of these errnos, or one of these texts in its message."""
    error_number, message = getattr(error, 'errno', None), str(error)
    return any(sign == error_number or (isinstance(sign, str) and sign in message) for sign in signs)


def is_inside(file: str, directory: Path) -> bool:
    if is_remote(file) or is_remote(directory):
        return is_remote(file) and is_remote(directory)
    return Path(file).absolute().is_relative_to(directory.absolute())


def format_error(error: Exception) -> str:
    return getattr(error, 'strerror', None) or ' '.join(str(error).split())[:80]


def describe_error_permission(error: Exception) -> str:
    """Return the permissions of the path that an error names, as the end of a message; or an empty text."""
    path_permission = describe_permission(path) if (path := get_error_path(error)) else ''
    return f': {path_permission}' if path_permission else ''
