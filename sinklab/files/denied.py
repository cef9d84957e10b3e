"""Storage errors that no second start of the same command mends: which they are, and what a person reads of them."""

import errno
import os
import pwd
import stat
from pathlib import Path

from sinklab.files.place import is_remote

# A permission, a file of another kind at the path, or a limit of this process. Another start meets the same.
PERMANENT = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP))
PERMANENT |= {errno.ENAMETOOLONG, errno.EFBIG}


def is_permanent(error: BaseException) -> bool:
    """Return whether a storage error names a path, and starting the same command again would meet it again."""
    return isinstance(error, OSError) and error.errno in PERMANENT and path_of(error) is not None


def path_of(error: BaseException) -> str | None:
    """Return the path that a storage error names; of a renaming, the new name."""
    name = getattr(error, 'filename2', None) or getattr(error, 'filename', None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) and name else None


def describe(error: OSError) -> str:
    """Return what is wrong with the path that an error names, and its permission, in one line."""
    seen = permission(path_of(error))
    return f'{path_of(error)} cannot be used ({error.strerror}{f"; {seen}" if seen else ""})'


def permission(name: str) -> str:
    """Return mode and owner of a path, or of the nearest folder above it that can be looked at, and this user.

    Returns:
        `PATH is MODE OWNER:GROUP, this process runs as USER`, or '' where nothing can be looked at.
    """
    if is_remote(name):
        return ''
    path = Path(os.path.abspath(name))
    for known in (path, *path.parents):
        try:
            found = known.lstat()
        except OSError:
            continue
        mode, owner = stat.filemode(found.st_mode), f'{user(found.st_uid)}:{found.st_gid}'
        return f'{known} is {mode} {owner}, this process runs as {user(os.geteuid())}'
    return ''


def user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
