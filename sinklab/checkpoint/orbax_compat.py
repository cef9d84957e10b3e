"""Orbax contexts for local and remote checkpoints, and translation of Orbax errors; filters of its logs.

Loggers and `sys.unraisablehook` belong to the whole process. One filter and one hook are installed and stay
installed, because another thread or library may have installed its own in the meantime. Inside `suppress_orbax_logs`
they suppress more.
"""

import contextlib
import errno
import functools
import gc
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from sinklab.errors import UserError, format_error
from sinklab.run_dir import RunDir
from sinklab.storage.paths import (
    PERMANENT_ERRNOS,
    describe_permission,
    get_error_path,
    is_remote,
)
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
            f'{path} cannot be read ({describe_root_cause(error)}); it has another version, or has changed since '
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


@functools.cache
def patch_orbax_for_s3() -> None:
    """Patch Orbax for s3:// paths; by itself it uses the TensorStore drivers of disks and gs:// only."""
    # Private: Orbax has no option for the TensorStore driver of a path (https://github.com/google/orbax/issues/872).
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    get_gcs_driver = gcs_utils.get_kvstore_for_gcs
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(('gs://', 's3:/'))
    gcs_utils.get_kvstore_for_gcs = lambda path: (
        make_s3_driver(path) if path.startswith('s3:/') else get_gcs_driver(path)
    )


def make_s3_driver(path: str) -> dict[str, Any]:
    """Make the TensorStore driver spec of an s3:// path, with endpoint and region from AWS variables.

    Orbax has normalized the path, which then begins with s3:/ instead of s3://.
    """
    bucket, _, key = path.removeprefix('s3:').lstrip('/').partition('/')
    options = dict(
        endpoint=get_variable('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL'), aws_region=get_variable(*REGION_VARIABLES)
    )
    if get_variable('AWS_ACCESS_KEY_ID'):  # do not try other sources, with a warning about each
        options['aws_credentials'] = {'type': 'environment'}
    return dict(driver='s3', bucket=bucket, path=key) | {name: value for name, value in options.items() if value}


def get_variable(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def describe_root_cause(error: BaseException) -> str:
    """Return the type and message of the root cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return format_error(error, with_type=True)


RERUN_HINT = 'and run the same command again: its last complete checkpoint is intact'
DISK_FULL_MESSAGE = f'no room is left on the disk of {{folder}}; make room {RERUN_HINT}'
ACCESS_MESSAGE = f'{{folder}} can no longer be read or written ({{error}}){{seen}}; make it accessible {RERUN_HINT}'
MISSING_MESSAGE = '{folder} no longer exists; restore it and run the same command again'
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
                message.format(folder=run_dir, error=format_reason(error), seen=describe_error_permission(error))
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
                    folder=output_path, error=format_reason(error), seen=describe_error_permission(error)
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


def format_reason(error: Exception) -> str:
    return getattr(error, 'strerror', None) or format_error(error)


def describe_error_permission(error: Exception) -> str:
    """Return the permissions of the path that an error names, as the end of a message; or an empty text."""
    path_permission = describe_permission(path) if (path := get_error_path(error)) else ''
    return f': {path_permission}' if path_permission else ''


ORBAX_PATH_PART = '/orbax/'  # in the paths of Orbax's source files
LOGGER_NAMES = None, 'absl', 'asyncio'
# Orbax stores an error of one of its threads, and raises it again where the save is awaited. It also logs the error
# with a traceback, once for each thread that waits for the first: 3 to 9 of them, 280 lines, around one line of ours.
ORBAX_FUTURE_FILE = 'orbax/checkpoint/_src/futures/future.py'
NEVER_RETRIEVED_TEXT = 'never retrieved'  # in asyncio's message about a task that was awaited with others
NEVER_AWAITED_PATTERN = 'coroutine .* was never awaited'


class OrbaxLogSuppressor:
    """Counter of threads inside `suppress_orbax_logs`; while there is one, a warning is ignored."""

    def __init__(self) -> None:
        self.lock, self.num_threads, self.warning_filter = threading.Lock(), 0, None

    def enter(self) -> None:
        install_filters()
        with self.lock:
            self.num_threads += 1
            if self.num_threads == 1:
                previous_filters = list(warnings.filters)
                warnings.filterwarnings('ignore', NEVER_AWAITED_PATTERN, RuntimeWarning)
                self.warning_filter = None if warnings.filters[0] in previous_filters else warnings.filters[0]

    def leave(self) -> None:
        with self.lock:
            self.num_threads -= 1
            if not self.num_threads:
                with contextlib.suppress(ValueError):  # filters that other threads have added in the meantime stay
                    warnings.filters.remove(self.warning_filter)


SUPPRESSOR, INSTALL_LOCK = OrbaxLogSuppressor(), threading.Lock()


@contextlib.contextmanager
def suppress_orbax_logs() -> Iterator[None]:
    """Suppress logs of Orbax, and messages of tasks that it leaves behind, inside the block."""
    SUPPRESSOR.enter()
    try:
        yield
    except BaseException:
        gc.collect()  # the last messages of those tasks appear now, while they are suppressed
        raise
    finally:
        SUPPRESSOR.leave()


def install_filters() -> None:
    """Install the filter and the hook, unless they are installed."""
    import absl.logging  # noqa: F401  creates the logger `absl` with its own class, as getLogger would not

    with INSTALL_LOCK:
        for name in LOGGER_NAMES:
            logging.getLogger(name).addFilter(is_logged)  # it adds the same filter only once
        if not isinstance(sys.unraisablehook, UnraisableHook):
            sys.unraisablehook = UnraisableHook(sys.unraisablehook)


def is_logged(record: logging.LogRecord) -> bool:
    """Return whether to log a record; storage errors that threads or tasks of Orbax raise are not logged.

    Inside `suppress_orbax_logs`, no record of Orbax is logged.
    """
    never_retrieved = NEVER_RETRIEVED_TEXT in str(record.msg)  # the message of asyncio has no arguments
    if SUPPRESSOR.num_threads and (never_retrieved or ORBAX_PATH_PART in record.pathname):
        return False
    error = record.exc_info[1] if record.exc_info else None
    # Orbax raises errors of TensorStore as ValueError.
    if record.name not in LOGGER_NAMES or not isinstance(error, OSError | ValueError):
        return True
    if record.name == 'asyncio':
        return not (never_retrieved and is_raised_in(error.__traceback__, ORBAX_PATH_PART))
    return not record.pathname.endswith(ORBAX_FUTURE_FILE)


class UnraisableHook:
    """A `sys.unraisablehook` that drops consequences of errors that Orbax raises itself.

    It passes everything else to the hook that was installed before it, and never to another one. So hooks that call
    each other cannot form a cycle, whichever of them is restored.
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self.hook = hook

    def __call__(self, unraisable: Any) -> None:
        is_suppressed = (
            SUPPRESSOR.num_threads and is_raised_in(unraisable.exc_traceback, ORBAX_PATH_PART, 'uvloop')
        ) or is_late_callback(unraisable)
        if not (
            is_suppressed and issubclass(unraisable.exc_type, Exception)
        ):  # KeyboardInterrupt is never suppressed
            self.hook(unraisable)


def is_late_callback(unraisable: Any) -> bool:
    """Return whether an error comes from TensorStore, which has called a closed event loop.

    When one write of a save fails, its event loop is closed. The other writes, which fail later, still call the loop
    from C++ threads, where nothing can be raised. The traceback of such an error has only frames of asyncio.
    """
    if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != 'Event loop is closed':
        return False
    modules = [frame.f_globals.get('__name__') for frame in iterate_frames(unraisable.exc_traceback)]
    return bool(modules) and all(module == 'asyncio.base_events' for module in modules)


def is_raised_in(trace: types.TracebackType | None, *parts: str) -> bool:
    """Return whether a frame of a traceback is of a file with one of these parts in its path."""
    return any(part in frame.f_code.co_filename for frame in iterate_frames(trace) for part in parts)


def iterate_frames(trace: types.TracebackType | None) -> Iterator[types.FrameType]:
    while trace:
        yield trace.tb_frame
        trace = trace.tb_next
