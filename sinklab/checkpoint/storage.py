"""What a folder says when it can no longer be written, in words."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from sinklab.checkpoint.orbax import describe_root_cause
from sinklab.files.denied import PERMANENT_ERRNOS, describe_permission, get_error_path
from sinklab.files.place import is_remote
from sinklab.folder import RunDir
from sinklab.record import UserError

RERUN_HINT = 'and run the same command again: its last whole checkpoint is intact'
DISK_FULL_MESSAGE = f'no room is left on the disk of {{folder}}; make room {RERUN_HINT}'
ACCESS_MESSAGE = f'{{folder}} can no longer be read or written ({{error}}){{seen}}; make it accessible {RERUN_HINT}'
MISSING_MESSAGE = '{folder} is no longer there; bring it back and run the same command again'
OUTPUT_DISK_FULL_MESSAGE = (
    'no room is left on the disk of {folder}; make room and run the same command again, or choose another folder'
)
OUTPUT_ACCESS_MESSAGE = '{folder} cannot be written ({error}){seen}; make it accessible, or choose another folder'
# By the numbers of the system, or by what Orbax, which has none, says instead.
DISK_FULL_SIGNS = (errno.ENOSPC, errno.EDQUOT, 'RESOURCE_EXHAUSTED', 'No space left', 'quota exceeded')
ACCESS_SIGNS = (*PERMANENT_ERRNOS, 'Read-only file system', 'PERMISSION_DENIED', 'Permission denied')
ACCESS_SIGNS += ('Operation not permitted', 'Not a directory', 'Is a directory', 'Too many levels of symbolic links')
ACCESS_SIGNS += ('File too large', 'File name too long')


@contextlib.contextmanager
def translate_storage_errors(run_dir: RunDir, saving_path: Path | None = None) -> Iterator[None]:
    """Refuses, in words, what the disk of a run's folder no longer takes.

    What is wrong with the storage in another way, Orbax makes a ValueError of while it saves; it is an OSError again.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if message := select_message(run_dir, error):
            raise UserError(message.format(folder=run_dir, error=format_error(error), seen=describe_error_permission(error))) from error
        if saving_path and isinstance(error, ValueError):
            raise OSError(f'{saving_path} could not be saved ({describe_root_cause(error)})') from error
        raise


@contextlib.contextmanager
def translate_write_errors(output_path: Path) -> Iterator[None]:
    """Refuse, in one line, what the disk of a new folder that Orbax writes does not take.

    Raises:
        Refusal: the disk is full, or the folder may not be written.
        OSError: Orbax could not write it for another reason.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if has_sign(error, DISK_FULL_SIGNS):
            raise UserError(OUTPUT_DISK_FULL_MESSAGE.format(folder=output_path)) from error
        if has_sign(error, ACCESS_SIGNS):
            raise UserError(OUTPUT_ACCESS_MESSAGE.format(folder=output_path, error=format_error(error), seen=describe_error_permission(error))) from error
        if isinstance(error, ValueError):
            raise OSError(f'{output_path} could not be written ({describe_root_cause(error)})') from error
        raise


def select_message(run_dir: RunDir, error: Exception) -> str | None:
    """What to say of an error; None where it is not about the folder."""
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
    """Return whether an error has one of these numbers of the system, or says one of these texts."""
    error_number, message = getattr(error, 'errno', None), str(error)
    return any(sign == error_number or (isinstance(sign, str) and sign in message) for sign in signs)


def is_inside(file: str, directory: Path) -> bool:
    if is_remote(file) or is_remote(directory):
        return is_remote(file) and is_remote(directory)
    return Path(file).absolute().is_relative_to(directory.absolute())


def format_error(error: Exception) -> str:
    return getattr(error, 'strerror', None) or ' '.join(str(error).split())[:80]


def describe_error_permission(error: Exception) -> str:
    """Return the permission of the path that an error names, to follow what is said of the folder."""
    path_permission = describe_permission(path) if (path := get_error_path(error)) else ''
    return f': {path_permission}' if path_permission else ''
