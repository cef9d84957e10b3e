"""Errors of disks and buckets: whether the same command can succeed later."""

import errno

from sinklab.errors import format_error

# A full disk, a missing permission, or a file of another kind: the same command meets the same error.
PERMANENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
PERMANENT_STATUSES = {'401', '403', '404'}  # of HTTP
BUCKET_PACKAGES = 'gcsfs', 'aiohttp', 'google', 'requests'  # whose errors have no common base class


def is_storage_error(error: BaseException) -> bool:
    """Return whether an error is one of a disk or of a bucket."""
    return isinstance(error, OSError) or type(error).__module__.partition('.')[0] in BUCKET_PACKAGES


def is_permanent_error(error: BaseException) -> bool:
    """Return whether a storage error would occur again after a restart."""
    return is_storage_error(error) and (
        getattr(error, 'errno', None) in PERMANENT_ERRNOS
        or str(getattr(error, 'code', '')) in PERMANENT_STATUSES
        # gcsfs raises OSError('Forbidden: ...') for status 403, and google.auth a class of its own.
        or str(error).startswith('Forbidden')
        or type(error).__name__ == 'DefaultCredentialsError'
    )


def describe_storage_error(error: BaseException) -> str:
    """Describe a storage error in one line: its path, if it names one, and its reason."""
    path = getattr(error, 'filename2', None) or getattr(error, 'filename', None)
    reason = getattr(error, 'strerror', None) or format_error(error, with_type=True)
    return f'{path} cannot be used ({reason})' if path else f'the storage cannot be used ({reason})'
