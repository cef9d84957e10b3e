"""Where stores and compiled programs are kept from one run to the next."""

import os
from pathlib import Path

from sinklab.record import Refusal


def cache() -> Path:
    """$SINKLAB_CACHE, or sinklab in the user's cache folder."""
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    chosen = os.environ.get('SINKLAB_CACHE') or Path(home) / 'sinklab'
    if '://' in str(chosen):
        raise Refusal(f'SINKLAB_CACHE={chosen} is no local folder; name one')
    return Path(chosen)
