"""Where stores and compiled programs are kept from one run to the next."""

import os
import shutil
from pathlib import Path

from sinklab.record import Refusal


def cache() -> Path:
    """$SINKLAB_CACHE, or sinklab in the user's cache folder."""
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    chosen = os.environ.get('SINKLAB_CACHE') or Path(home) / 'sinklab'
    if '://' in str(chosen):
        raise Refusal(f'SINKLAB_CACHE={chosen} is no local folder; name one')
    return Path(chosen)


def room(folder: Path) -> int:
    """Bytes that a folder of the cache may take: $SINKLAB_CACHE_GB, or half of what it could on its disk."""
    if given := os.environ.get('SINKLAB_CACHE_GB'):
        try:
            return int(float(given) * 1e9)
        except (ValueError, OverflowError) as error:
            raise Refusal(f'SINKLAB_CACHE_GB={given} is no number of GB; give one, such as 100') from error
    taken = sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())
    return (taken + shutil.disk_usage(folder).free) // 2
