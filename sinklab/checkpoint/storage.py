"""What a folder says when it can no longer be written, in words."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from sinklab.checkpoint.orbax import reason
from sinklab.files.place import is_remote
from sinklab.folder import Folder
from sinklab.record import Refusal

AGAIN = 'and run the same command again: its last whole checkpoint is intact'
FULL = f'no room is left on the disk of {{folder}}; make room {AGAIN}'
CLOSED = f'{{folder}} can no longer be read or written ({{error}}); make it accessible {AGAIN}'
VANISHED = '{folder} is no longer there; bring it back and run the same command again'
# By the numbers of the system, or by what Orbax, which has none, says instead.
WORDS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, 'RESOURCE_EXHAUSTED', 'No space left', 'quota exceeded'), FULL)
WORDS |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), CLOSED)
WORDS |= dict.fromkeys(('Read-only file system', 'PERMISSION_DENIED', 'Permission denied'), CLOSED)


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
            raise Refusal(words.format(folder=folder, error=line(error))) from error
        if saving and isinstance(error, ValueError):
            raise OSError(f'{saving} could not be saved ({reason(error)})') from error
        raise


def words_of(folder: Folder, error: Exception) -> str | None:
    """What to say of an error; None where it is not about the folder."""
    file = getattr(error, 'filename', None)
    if isinstance(file, str) and not is_inside(file, folder.path):
        return None
    number, said = getattr(error, 'errno', None), str(error)
    for cause, words in WORDS.items():
        if cause == number or (isinstance(cause, str) and cause in said):
            return words
    lost = number == errno.ENOENT or 'NOT_FOUND' in said
    return VANISHED if lost and not folder.checkpoints.exists() else None


def is_inside(file: str, folder: Path) -> bool:
    if is_remote(file) or is_remote(folder):
        return is_remote(file) and is_remote(folder)
    return Path(file).absolute().is_relative_to(folder.absolute())


def line(error: Exception) -> str:
    return getattr(error, 'strerror', None) or ' '.join(str(error).split())[:80]
