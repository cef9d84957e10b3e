"""Stores of buckets that are kept on this machine's disk, within a bound: when they are, and which of them go."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sinklab.cache import cache, room
from sinklab.data.store.far import BESIDE
from sinklab.files.whole import UNFINISHED

SURPLUS = 1.2  # times the bytes that are needed may be fetched
USED = '.used'  # locked by whoever uses a store, with the bytes that it may come to; its time is when that began


def covered(share: float, epochs: float) -> float:
    """The share of the windows that a process reads that has a share f of every batch, after n + r epochs.

    1 - (1 - f)^n (1 - f r): an epoch takes each window into one batch, and the order of epochs is independent.
    """
    full, rest = divmod(epochs, 1)
    return 1 - (1 - share) ** full * (1 - share * rest)


def worthwhile(coverage: float) -> bool:
    """Whether files as a whole, and what is read beside them, are not much more than what is needed of them."""
    return SURPLUS * coverage >= 1 + BESIDE


class Shelf:
    """A folder for the files of a store, which is not taken away while this object, or its process, lives."""

    def __init__(self, folder: Path, size: int):
        folder.mkdir(exist_ok=True)
        if not in_use(folder):
            for left in folder.glob(f'*{UNFINISHED}'):
                left.unlink()
        self.folder, self.used = folder, (folder / USED).open('a')
        fcntl.flock(self.used, fcntl.LOCK_SH)
        (folder / USED).write_text(str(size))


def shelf(digest: str, size: int) -> Shelf | None:
    """A place for a store of so many bytes; those used longest ago make room. None where there is none."""
    root = cache() / 'remote'
    try:
        root.mkdir(parents=True, exist_ok=True)
        with alone(root / '.lock'):
            if size > room(root) - sum(occupied(other) for other in others(root, digest) if in_use(other)):
                return None
            for other in sorted(others(root, digest), key=last_used):
                if size + sum(map(occupied, others(root, digest))) > room(root) and not in_use(other):
                    shutil.rmtree(other)
            return Shelf(root / digest, size)
    except OSError:  # a cache that cannot be written keeps nothing
        return None


def others(root: Path, digest: str) -> list[Path]:
    return [folder for folder in root.iterdir() if folder.is_dir() and folder.name != digest]


def in_use(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), (folder / USED).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def occupied(folder: Path) -> int:
    """Bytes of a store's files; of one in use, of those that may still come."""
    found = sum(path.stat().st_size for path in folder.iterdir() if path.name != USED)
    return max(found, int((folder / USED).read_text() or 0)) if in_use(folder) else found


def last_used(folder: Path) -> float:
    return (folder / USED if (folder / USED).exists() else folder).stat().st_mtime


@contextlib.contextmanager
def alone(path: Path) -> Iterator[IO]:
    with path.open('a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
