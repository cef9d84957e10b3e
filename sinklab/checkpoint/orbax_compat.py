"""Orbax contexts for local and remote checkpoints, translation of Orbax errors, and filters of its messages."""

import contextlib
import errno
import functools
import logging
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator
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
    make_absolute,
)
from sinklab.storage.retry import StorageTimeoutError

TEMPORARY_SUFFIX = '.orbax-checkpoint-tmp'  # in the name of an unfinished save
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
def use_orbax_context(path: Path, partial_load: bool = False) -> Iterator[None]:
    """Use an Orbax context that makes directories before it starts threads, and that supports buckets.

    Threads that Orbax starts before it makes directories wait 300 s for a directory that cannot be made, and the
    process cannot exit in the meantime. Nothing is renamed in a bucket: a save there ends with a commit file.

    Args:
        path: The checkpoint.
        partial_load: Whether a tree with only some leaves of the checkpoint can be loaded.
    """
    install_log_filters()
    context = ocp.Context()
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = partial_load
    if is_remote(path):
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    with context:
        yield


@contextlib.contextmanager
def use_read_context(path: Path, partial_load: bool = False) -> Iterator[None]:
    """Use an Orbax context, and translate errors of reading a checkpoint into a UserError of one line.

    Orbax's own messages have thousands of characters.
    """
    try:
        with use_orbax_context(path, partial_load):
            yield
    except UNRELATED_ERRORS:
        raise
    except Exception as error:  # of any type: it depends on what is wrong with a file
        raise UserError(
            f'{path} cannot be read ({describe_root_cause(error)}); it has another version, or has changed since '
            'it was verified: see sinklab checkpoint verify'
        ) from error


def load_state(path: Path, abstract_state: Any, partial_load: bool = False) -> Any:
    """Load the leaves of a checkpoint that `abstract_state` has; with `partial_load` it need not have all of them."""
    with use_read_context(path, partial_load):
        return ocp.load(make_absolute(path), abstract_state, checkpointable_name='state')


def describe_root_cause(error: BaseException) -> str:
    """Return the type and message of the root cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return format_error(error, with_type=True)


# Texts in messages of Orbax and TensorStore, whose errors have no errno.
DISK_FULL_ERRNOS, DISK_FULL_TEXTS = (errno.ENOSPC, errno.EDQUOT), ('RESOURCE_EXHAUSTED', 'quota exceeded')
ACCESS_ERRNOS, ACCESS_TEXTS = PERMANENT_ERRNOS, ('PERMISSION_DENIED',)


@contextlib.contextmanager
def translate_storage_errors(run_dir: RunDir | None, saving_path: Path | None = None) -> Iterator[None]:
    """Translate errors of the storage of a run directory into a UserError.

    While it saves, Orbax raises other errors of the storage as ValueError. With `saving_path` these become OSError.

    Args:
        run_dir: The run directory; None if `saving_path` is not in one.
        saving_path: The checkpoint that is being saved, if any.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        file, folder, rerun = get_error_path(error), run_dir or saving_path, 'and run the same command again'
        if run_dir is None or file is None or is_inside(file, run_dir.path):
            remedy = (
                f'{rerun}{": its last complete checkpoint is intact" if run_dir else ", or choose another folder"}'
            )
            if matches_storage_error(error, DISK_FULL_ERRNOS, DISK_FULL_TEXTS):
                raise UserError(f'no room is left on the disk of {folder}; make room {remedy}') from error
            if matches_storage_error(error, ACCESS_ERRNOS, ACCESS_TEXTS):
                reason = getattr(error, 'strerror', None) or format_error(error)
                permission = f': {text}' if file and (text := describe_permission(file)) else ''
                raise UserError(
                    f'{folder} cannot be read or written ({reason}){permission}; make it accessible {remedy}'
                ) from error
            if (
                run_dir
                and matches_storage_error(error, (errno.ENOENT,), ('NOT_FOUND',))
                and not run_dir.checkpoint_dir.exists()
            ):
                raise UserError(f'{run_dir} no longer exists; restore it {rerun}') from error
        if saving_path and isinstance(error, ValueError):
            raise OSError(f'{saving_path} could not be saved ({describe_root_cause(error)})') from error
        raise


def matches_storage_error(error: Exception, errnos: Collection[int], texts: tuple[str, ...]) -> bool:
    """Return whether an error has one of these errnos, or the text of one, or one of these texts, in its message."""
    texts = (*map(os.strerror, errnos), *texts)
    return getattr(error, 'errno', None) in errnos or any(text in str(error) for text in texts)


def is_inside(file: str, directory: Path) -> bool:
    if is_remote(file) or is_remote(directory):
        return is_remote(file) and is_remote(directory)
    return Path(file).absolute().is_relative_to(directory.absolute())


ORBAX_PATH_PART = '/orbax/checkpoint/'  # in the paths of Orbax's source files
EVENT_LOOP_PATH_PARTS = '/asyncio/', 'uvloop/'


def install_log_filters() -> None:
    """Suppress messages about errors that Orbax also raises, in the whole process.

    Orbax raises a storage error once, where the save is awaited, and also logs it with a traceback in each of 3 to 9
    waiting threads. Operations that still run then fail, too: asyncio logs their errors, or Python reports them as
    unraisable. The filters drop these messages, because the first error is reported.
    """
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(should_log)  # it adds the same filter only once
    if getattr(sys.unraisablehook, 'func', None) is not report_unraisable:
        warnings.filterwarnings('ignore', r"coroutine '_\w+' was never awaited", RuntimeWarning)  # private coroutines
        sys.unraisablehook = functools.partial(report_unraisable, sys.unraisablehook)


def should_log(record: logging.LogRecord) -> bool:
    """Return whether to log a record: no record of Orbax, unless its error is not an error of the storage."""
    error = record.exc_info[1] if record.exc_info else None
    if record.name == 'asyncio':
        return not (error and is_secondary_orbax_error(error, error.__traceback__))
    # Orbax raises errors of TensorStore as ValueError.
    return ORBAX_PATH_PART not in record.pathname or not isinstance(error, OSError | ValueError | None)


def report_unraisable(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Call the previous hook, unless the error is a secondary error of Orbax; KeyboardInterrupt is none."""
    if not (
        issubclass(unraisable.exc_type, Exception)
        and is_secondary_orbax_error(unraisable.exc_value, unraisable.exc_traceback)
    ):
        hook(unraisable)


def is_secondary_orbax_error(error: BaseException | None, trace: types.TracebackType | None) -> bool:
    """Return whether an error was raised in Orbax, or by TensorStore in an event loop of Orbax.

    TensorStore raises errors, and calls an event loop that is already closed, from C++ threads: the tracebacks have
    no frames but those of the event loop.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    is_closed_loop = isinstance(error, RuntimeError) and str(error) == 'Event loop is closed' and files
    is_in_event_loop = all(any(part in file for part in EVENT_LOOP_PATH_PARTS) for file in files)
    return any(ORBAX_PATH_PART in file for file in files) or bool(
        is_in_event_loop and (is_closed_loop or 'tensorstore' in str(error))
    )
