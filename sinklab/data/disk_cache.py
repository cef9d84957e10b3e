"""Disk cache of remote token stores, limited in size, with LRU eviction."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sinklab.data.remote_store import MAX_RANGED_SHARE
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX
from sinklab.storage.cache_dir import get_cache_dir, get_cache_limit_bytes

MAX_FETCH_RATIO = 1.2  # largest allowed ratio of fetched bytes to needed bytes
# Each user of a cached store holds a shared lock on this file. It contains the bytes that the store may grow to, and
# its mtime is the start of the last use.
USED_FILE = '.used'


def compute_coverage(share: float, epochs: float) -> float:
    """Compute the expected fraction of windows that a process reads with a fraction of every batch.

    For a fraction f and n + r epochs (n whole, r < 1) it is 1 - (1 - f)^n (1 - f r), because an epoch uses each
    window once and epochs are shuffled independently.

    Args:
        share: Fraction of the rows of every batch that the process reads.
        epochs: Number of epochs, may be fractional.
    """
    full_epochs, partial_epoch = divmod(epochs, 1)
    return 1 - (1 - share) ** full_epochs * (1 - share * partial_epoch)


def is_worth_fetching(coverage: float) -> bool:
    """Return whether fetching whole files costs little more than ranged reads of the needed parts.

    The cost includes the ranged reads while the files are being fetched.

    Args:
        coverage: Fraction of the files that will be read.
    """
    return MAX_FETCH_RATIO * coverage >= 1 + MAX_RANGED_SHARE


class DiskCache:
    """Cache folder of one store, protected from eviction by a shared lock as long as this object exists."""

    def __init__(self, folder: Path, size: int):
        folder.mkdir(exist_ok=True)
        if not is_in_use(folder):
            for leftover in folder.glob(f'*{TEMPORARY_SUFFIX}'):
                leftover.unlink()
        self.folder, self.used_file = folder, (folder / USED_FILE).open('a')
        fcntl.flock(self.used_file, fcntl.LOCK_SH)
        (folder / USED_FILE).write_text(str(size))


def reserve_disk_cache(digest: str, size: int) -> DiskCache | None:
    """Reserve a cache folder for a store, evicting the least recently used stores that nobody uses.

    Args:
        digest: Digest of the store, which names the folder.
        size: Bytes that the store may grow to.

    Returns:
        None if the store does not fit beside the stores in use, or if the cache cannot be written.
    """
    root = get_cache_dir() / 'remote'
    try:
        root.mkdir(parents=True, exist_ok=True)
        with lock_exclusively(root / '.lock'):
            if size > get_cache_limit_bytes(root) - sum(
                count_cached_bytes(other) for other in list_other_stores(root, digest) if is_in_use(other)
            ):
                return None
            for other in sorted(list_other_stores(root, digest), key=get_last_use_time):
                if size + sum(map(count_cached_bytes, list_other_stores(root, digest))) > get_cache_limit_bytes(
                    root
                ) and not is_in_use(other):
                    shutil.rmtree(other)
            return DiskCache(root / digest, size)
    except OSError:  # the cache is optional: without it the store is read by ranges
        return None


def list_other_stores(root: Path, digest: str) -> list[Path]:
    return [folder for folder in root.iterdir() if folder.is_dir() and folder.name != digest]


def is_in_use(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), (folder / USED_FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def count_cached_bytes(folder: Path) -> int:
    """Count the bytes of a cached store; a store in use counts at least the bytes that it reserved."""
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.name != USED_FILE)
    return max(num_bytes, int((folder / USED_FILE).read_text() or 0)) if is_in_use(folder) else num_bytes


def get_last_use_time(folder: Path) -> float:
    return (folder / USED_FILE if (folder / USED_FILE).exists() else folder).stat().st_mtime


@contextlib.contextmanager
def lock_exclusively(path: Path) -> Iterator[IO]:
    with path.open('a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
