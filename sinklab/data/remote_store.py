"""Token store in a bucket: etags of objects, ranged reads, and the disk cache that they fill."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from sinklab.errors import UserError
from sinklab.storage.cache_dir import get_cache_dir, get_cache_limit_bytes
from sinklab.storage.compare_and_swap import hold_lock
from sinklab.storage.files import TEMPORARY_SUFFIX, atomic_write, read_json
from sinklab.storage.paths import get_file_system, list_objects
from sinklab.thread_pools import DaemonThreadPool

ETAGS_FILE = 'marks.json'  # etags of the shard files of a finished store in a bucket, next to meta.json


def list_object_digests(folder: Path, prefix: str = '') -> dict[str, str]:
    """List 'SIZE DIGEST' of the objects of a folder by name; one request lists a thousand objects.

    Args:
        folder: A folder of a bucket.
        prefix: What the relative names must begin with.
    """
    return {name: f'{info.size} {info.content_digest}' for name, info in list_objects(folder, prefix).items()}


def read_etags(folder: Path) -> dict[str, str]:
    """Read the etags that were recorded when a store was finished.

    Returns:
        Etags by file name; {} if the file is missing or damaged, as in a store that was copied here.
    """
    try:
        return read_json(folder / ETAGS_FILE, dict[str, str])
    except (FileNotFoundError, UserError):
        return {}


def write_etags(folder: Path, etags: Mapping[str, str]) -> None:
    with atomic_write(folder / ETAGS_FILE) as unfinished:
        unfinished.write_text(json.dumps(etags, indent=1) + '\n', encoding='utf-8')


def read_objects(folder: Path, files: Iterable[str]) -> list[bytes]:
    """Read small objects in parallel and return their bytes in the order of `files`."""
    paths = [os.fspath(folder / file) for file in files]
    contents_by_path = get_file_system(folder).cat(paths) if paths else {}
    return [contents_by_path[path.partition('://')[2]] for path in paths]


MAX_FETCHER_THREADS = 4  # whole files that a process fetches in parallel


@functools.cache
def get_fetcher_pool() -> DaemonThreadPool:
    return DaemonThreadPool(MAX_FETCHER_THREADS)


MAX_RANGED_SHARE = 0.05  # fraction of a file that may be read by ranges while the whole file is being fetched


class RemoteStore:
    """Objects of a store in a bucket, as listed when the store was opened.

    Reading an object that has changed since then raises UserError.
    """

    def __init__(self, folder: Path):
        self.folder, self.storage = os.fspath(folder), get_file_system(folder)
        self.object_infos = list_objects(folder)

    def compute_version(self, files: Iterable[str]) -> str:
        """Compute a digest of the sizes and versions of some files, which processes compare."""
        return hashlib.sha256(repr([(file, self.object_infos.get(file)) for file in files]).encode()).hexdigest()[:16]

    def read(self, file: str, start: int = 0, end: int | None = None) -> bytes:
        info = self.object_infos[file]
        end = info.size if end is None else end
        if start >= end:
            return b''
        try:
            return self.storage.read_range(f'{self.folder}/{file}', start, end, info.version)
        except OSError as error:
            if error.errno == errno.ESTALE:
                problem = f'{self.folder} has changed since it was opened: {file} was replaced or deleted'
                raise UserError(f'{problem}; restore it and run the same command again') from error
            raise


class RemoteArray:
    """A file in a bucket as an array; a slice is read on access, and a read of the whole file is verified."""

    def __init__(self, remote_store: RemoteStore, file: str, dtype: np.dtype, sha256: str):
        self.remote_store, self.file, self.dtype, self.sha256 = remote_store, file, dtype, sha256

    def __len__(self) -> int:
        return self.remote_store.object_infos[self.file].size // self.dtype.itemsize

    def __getitem__(self, index: slice) -> np.ndarray:
        start, end, _ = index.indices(len(self))
        content = self.remote_store.read(self.file, start * self.dtype.itemsize, end * self.dtype.itemsize)
        if end - start == len(self) and hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(
                f'{self.remote_store.folder} is damaged: the sha256 of {self.file} differs from that of the store; '
                'copy the file again, or run its prepare command again, which repairs it'
            )
        return np.frombuffer(content, self.dtype)


class CachedArray(RemoteArray):
    """RemoteArray that fetches the whole file to the disk cache in the background after the first access.

    Until the file is there, up to MAX_RANGED_SHARE of it is read by ranges. A read beyond that waits for the file.
    """

    def __init__(self, remote_store: RemoteStore, file: str, dtype: np.dtype, sha256: str, folder: Path):
        super().__init__(remote_store, file, dtype, sha256)
        self.path, self.lock = folder / file, threading.Lock()
        self.num_ranged, self.fetch_future, self.local_array = 0, None, None
        if self.path.exists():  # complete: atomic_write gives a file its name when it is complete
            self.local_array = np.memmap(self.path, dtype, 'r').view(np.ndarray)

    def __getitem__(self, index: slice) -> np.ndarray:
        if self.local_array is None and self.is_read_from_file(index):
            self.local_array = self.fetch_future.result()
        return super().__getitem__(index) if self.local_array is None else self.local_array[index]

    def is_read_from_file(self, index: slice) -> bool:
        """Return whether a slice is read from the fetched file, possibly after waiting for the fetch."""
        start, end, _ = index.indices(len(self))
        with self.lock:
            self.fetch_future = self.fetch_future or get_fetcher_pool().submit(self.fetch_file)
            if self.fetch_future.done() or self.num_ranged + end - start > MAX_RANGED_SHARE * len(self):
                return True
            self.num_ranged += end - start
        return False

    def fetch_file(self) -> np.ndarray | None:
        """Fetch the file to the disk cache, unless another process has done so, and map it.

        Returns:
            None if the disk cannot hold the file.
        """
        content = None if self.path.exists() else super().__getitem__(slice(None))
        try:
            if not self.path.exists():
                with atomic_write(self.path) as unfinished:
                    unfinished.write_bytes(content)
            return np.memmap(self.path, self.dtype, 'r').view(np.ndarray)
        except OSError:
            return None


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
        fcntl.flock(self.used_file, fcntl.LOCK_SH)  # filelock has no shared lock
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
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(root / '.lock'))
        except (OSError, UserError):  # the cache is optional: without it the store is read by ranges
            return None
        with contextlib.suppress(OSError):
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
