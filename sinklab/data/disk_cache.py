"""Disk cache of remote token stores, bounded in size, with eviction of the least recently used."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sinklab.data.remote_store import MAX_RANGED_SHARE
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX
from sinklab.storage.cache_dir import get_cache_dir, get_cache_limit_bytes

MAX_FETCH_RATIO = 1.2  # times the bytes that are needed may be fetched
USED_FILE = '.used'  # locked by whoever uses a store, with the bytes that it may come to; its time is when that began


def compute_coverage(share: float, epochs: float) -> float:
    """The share of the windows that a process reads that has a share f of every batch, after n + r epochs.

    1 - (1 - f)^n (1 - f r): an epoch takes each window into one batch, and the order of epochs is independent.
    """
    full_epochs, partial_epoch = divmod(epochs, 1)
    return 1 - (1 - share) ** full_epochs * (1 - share * partial_epoch)


def is_worth_fetching(coverage: float) -> bool:
    """Whether files as a whole, and what is read beside them, are not much more than what is needed of them."""
    return MAX_FETCH_RATIO * coverage >= 1 + MAX_RANGED_SHARE


class DiskCache:
    """A folder for the files of a store, which is not taken away while this object, or its process, lives."""

    def __init__(self, folder: Path, size: int):
        folder.mkdir(exist_ok=True)
        if not is_in_use(folder):
            for leftover in folder.glob(f'*{TEMPORARY_SUFFIX}'):
                leftover.unlink()
        self.folder, self.used_file = folder, (folder / USED_FILE).open('a')
        fcntl.flock(self.used_file, fcntl.LOCK_SH)
        (folder / USED_FILE).write_text(str(size))


def reserve_disk_cache(digest: str, size: int) -> DiskCache | None:
    """A place for a store of so many bytes; those used longest ago make room. None where there is none."""
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
    except OSError:  # a cache that cannot be written keeps nothing
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
    """Bytes of a store's files; of one in use, of those that may still come."""
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.name != USED_FILE)
    return max(num_bytes, int((folder / USED_FILE).read_text() or 0)) if is_in_use(folder) else num_bytes


def get_last_use_time(folder: Path) -> float:
    return (folder / USED_FILE if (folder / USED_FILE).exists() else folder).stat().st_mtime


@contextlib.contextmanager
def lock_exclusively(path: Path) -> Iterator[IO]:
    with path.open('a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
