"""Where stores and compiled programs are kept from one run to the next."""

import contextlib
import os
import shutil
from pathlib import Path

from sinklab.record import Refusal


def cache() -> Path:
    """Return $SINKLAB_CACHE, or sinklab in the user's cache folder; make it, for this user alone, if it is not there.

    Compiled programs of it are run, so that nobody else may write there. The mode of a folder that exists is left.
    """
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    chosen = os.environ.get('SINKLAB_CACHE') or Path(home) / 'sinklab'
    if '://' in str(chosen):
        raise Refusal(f'SINKLAB_CACHE={chosen} is no local folder; name one')
    with contextlib.suppress(OSError):  # whoever writes there says what is wrong
        Path(chosen).mkdir(0o700, parents=True, exist_ok=True)
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
