"""The cache folder of token stores, imported models and compiled programs."""

import os
from pathlib import Path

from platformdirs import user_cache_dir

from sinklab.errors import UserError


def get_cache_dir() -> Path:
    """Return the cache folder: $SINKLAB_CACHE, or `sinklab` in the user's cache folder.

    Raises:
        UserError: $SINKLAB_CACHE is a URL.
    """
    cache_dir = os.environ.get('SINKLAB_CACHE') or user_cache_dir('sinklab')
    if '://' in cache_dir:
        raise UserError(f'SINKLAB_CACHE={cache_dir} is not a local folder; set it to one')
    return Path(cache_dir)
