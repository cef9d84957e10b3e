"""What a folder says when it can no longer be written, in words."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from sinklab.checkpoint.orbax import reason
from sinklab.files.denied import PERMANENT, path_of, permission
from sinklab.files.place import is_remote
from sinklab.folder import Folder
from sinklab.record import Refusal

AGAIN = 'and run the same command again: its last whole checkpoint is intact'
FULL = f'no room is left on the disk of {{folder}}; make room {AGAIN}'
CLOSED = f'{{folder}} can no longer be read or written ({{error}}){{seen}}; make it accessible {AGAIN}'
VANISHED = '{folder} is no longer there; bring it back and run the same command again'
OUT_FULL = (
    'no room is left on the disk of {folder}; make room and run the same command again, or choose another folder'
)
OUT_CLOSED = '{folder} cannot be written ({error}){seen}; make it accessible, or choose another folder'
# By the numbers of the system, or by what Orbax, which has none, says instead.
FULL_SIGNS = (errno.ENOSPC, errno.EDQUOT, 'RESOURCE_EXHAUSTED', 'No space left', 'quota exceeded')
CLOSED_SIGNS = (*PERMANENT, 'Read-only file system', 'PERMISSION_DENIED', 'Permission denied')
CLOSED_SIGNS += ('Operation not permitted', 'Not a directory', 'Is a directory', 'Too many levels of symbolic links')
CLOSED_SIGNS += ('File too large', 'File name too long')


@contextlib.contextmanager
def room(folder: Folder, saving: Path | None = None) -> Iterator[None]:
    """Refuses, in words, what the disk of a run's folder no longer takes.

    What is wrong with the storage in another way, Orbax makes a ValueError of while it saves; it is an OSError again.
    """
    try:
        yield
    except Refusal:
        raise
    except (OSError, ValueError) as error:
        if words := words_of(folder, error):
            raise Refusal(words.format(folder=folder, error=line(error), seen=seen(error))) from error
        if saving and isinstance(error, ValueError):
            raise OSError(f'{saving} could not be saved ({reason(error)})') from error
        raise


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Refuse, in one line, what the disk of a new folder that Orbax writes does not take.

    Raises:
        Refusal: the disk is full, or the folder may not be written.
        OSError: Orbax could not write it for another reason.
    """
    try:
        yield
    except Refusal:
        raise
    except (OSError, ValueError) as error:
        if has_sign(error, FULL_SIGNS):
            raise Refusal(OUT_FULL.format(folder=out)) from error
        if has_sign(error, CLOSED_SIGNS):
            raise Refusal(OUT_CLOSED.format(folder=out, error=line(error), seen=seen(error))) from error
        if isinstance(error, ValueError):
            raise OSError(f'{out} could not be written ({reason(error)})') from error
        raise


def words_of(folder: Folder, error: Exception) -> str | None:
    """What to say of an error; None where it is not about the folder."""
    file = path_of(error)
    if file is not None and not is_inside(file, folder.path):
        return None
    if has_sign(error, FULL_SIGNS):
        return FULL
    if has_sign(error, CLOSED_SIGNS):
        return CLOSED
    lost = getattr(error, 'errno', None) == errno.ENOENT or 'NOT_FOUND' in str(error)
    return VANISHED if lost and not folder.checkpoints.exists() else None


def has_sign(error: Exception, signs: tuple[int | str, ...]) -> bool:
    """Return whether an error has one of these numbers of the system, or says one of these texts."""
    number, said = getattr(error, 'errno', None), str(error)
    return any(sign == number or (isinstance(sign, str) and sign in said) for sign in signs)


def is_inside(file: str, folder: Path) -> bool:
    if is_remote(file) or is_remote(folder):
        return is_remote(file) and is_remote(folder)
    return Path(file).absolute().is_relative_to(folder.absolute())


def line(error: Exception) -> str:
    return getattr(error, 'strerror', None) or ' '.join(str(error).split())[:80]


def seen(error: Exception) -> str:
    """Return the permission of the path that an error names, to follow what is said of the folder."""
    found = permission(path) if (path := path_of(error)) else ''
    return f': {found}' if found else ''
