"""Storage errors that occur again after a restart, and their description with path and permissions."""

import errno
import os
import pwd
import stat
from pathlib import Path

from sinklab.storage.paths import is_remote

# A permission, a file of another kind at the path, or a limit of this process. A restart meets the same error.
PERMANENT_ERRNOS = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP))
PERMANENT_ERRNOS |= {errno.ENAMETOOLONG, errno.EFBIG}


def is_permanent_error(error: BaseException) -> bool:
    """Return whether a storage error names a path and would occur again after a restart."""
    return isinstance(error, OSError) and error.errno in PERMANENT_ERRNOS and get_error_path(error) is not None


def get_error_path(error: BaseException) -> str | None:
    """Return the path that a storage error names; for a rename, the new path."""
    name = getattr(error, 'filename2', None) or getattr(error, 'filename', None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) and name else None


def describe_path_error(error: OSError) -> str:
    """Describe in one line what is wrong with the path that an error names, and its permissions."""
    permissions = describe_permission(get_error_path(error))
    return f'{get_error_path(error)} cannot be used ({error.strerror}{f"; {permissions}" if permissions else ""})'


def describe_permission(name: str) -> str:
    """Describe the mode and owner of a path or of its nearest folder that can be inspected.

    Returns:
        `PATH is MODE OWNER:GROUP, this process runs as USER`; '' for a bucket, or if nothing can be inspected.
    """
    if is_remote(name):
        return ''
    path = Path(os.path.abspath(name))
    for existing_path in (path, *path.parents):
        try:
            info = existing_path.lstat()
        except OSError:
            continue
        mode, owner = stat.filemode(info.st_mode), f'{get_user_name(info.st_uid)}:{info.st_gid}'
        return f'{existing_path} is {mode} {owner}, this process runs as {get_user_name(os.geteuid())}'
    return ''


def get_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
