"""Objects that are read and written on the condition that they are still what was seen: by their marks."""

import errno
from collections.abc import Callable
from typing import Any

from sinklab.files.patience import status

GONE = {404, 412, 416}  # of a read that wants an object as it was


def unchanged(path: str, size: int, read: Callable[[], bytes]) -> bytes:
    """A range of an object that is still the one that had a mark; of another, or of none, an error with ESTALE."""
    try:
        content = read()
    except OSError as error:  # gcsfs says 412 by FileExistsError
        if isinstance(error, FileExistsError | FileNotFoundError) or status(error) in GONE:
            raise OSError(errno.ESTALE, f'{path} is not what it was') from error
        raise
    if len(content) != size:
        raise OSError(errno.EIO, f'{path} gave {len(content)} bytes of {size}')
    return content


def own(at: Any, path: str, content: bytes) -> str | None:
    """The mark of what lies there if this process wrote it, in a try whose answer was lost; contents are unique."""
    try:
        found, mark = at.read_marked(path)
    except FileNotFoundError:
        return None
    return mark if found == content else None
