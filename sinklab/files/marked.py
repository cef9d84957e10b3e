"""Objects that are read and written on the condition that they are still what was seen: by their marks."""

import errno
from collections.abc import Callable
from typing import Any

from sinklab.files.patience import get_http_status

CHANGED_STATUSES = {404, 412, 416}  # of a read that wants an object as it was


def read_if_match(path: str, size: int, read: Callable[[], bytes]) -> bytes:
    """A range of an object that is still the one that had a mark; of another, or of none, an error with ESTALE."""
    try:
        content = read()
    except OSError as error:  # gcsfs says 412 by FileExistsError
        if isinstance(error, FileExistsError | FileNotFoundError) or get_http_status(error) in CHANGED_STATUSES:
            raise OSError(errno.ESTALE, f'{path} is not what it was') from error
        raise
    if len(content) != size:
        raise OSError(errno.EIO, f'{path} gave {len(content)} bytes of {size}')
    return content


def find_own_version(file_system: Any, path: str, content: bytes) -> str | None:
    """The mark of what lies there if this process wrote it, in a try whose answer was lost; contents are unique."""
    try:
        stored, version = file_system.read_marked(path)
    except FileNotFoundError:
        return None
    return version if stored == content else None
