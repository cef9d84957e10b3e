"""The cache directory of token stores and compiled programs, and its size limit."""

import contextlib
import os
import shutil
from pathlib import Path

from platformdirs import user_cache_dir

from sinklab.errors import UserError


def get_cache_dir() -> Path:
    """Return the cache directory: $SINKLAB_CACHE, or `sinklab` in the user's cache folder.

    If it is missing, it is created with access for this user alone, because compiled programs in it are executed. The
    mode of an existing directory is not changed.

    Raises:
        UserError: $SINKLAB_CACHE is a URL.
    """
    cache_dir = os.environ.get('SINKLAB_CACHE') or user_cache_dir('sinklab')
    if '://' in cache_dir:
        raise UserError(f'SINKLAB_CACHE={cache_dir} is not a local folder; set it to one')
    with contextlib.suppress(OSError):  # the first write there reports the error
        Path(cache_dir).mkdir(0o700, parents=True, exist_ok=True)
    return Path(cache_dir)


def get_cache_limit_bytes(folder: Path) -> int:
    """Return how many bytes a cache folder may have.

    The limit is $SINKLAB_CACHE_GB in units of 10^9 bytes, or half of the sum of the size of the folder and the free
    space of its disk.

    Raises:
        UserError: $SINKLAB_CACHE_GB is not a number.
    """
    if limit_gb := os.environ.get('SINKLAB_CACHE_GB'):
        try:
            return int(float(limit_gb) * 1e9)
        except (ValueError, OverflowError) as error:
            raise UserError(f'SINKLAB_CACHE_GB={limit_gb} is not a number of GB; set one, such as 100') from error
    used_bytes = sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())
    return (used_bytes + shutil.disk_usage(folder).free) // 2
