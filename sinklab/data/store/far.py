"""The files of a store in a bucket as they were when it was opened, read by ranges, or fetched to be kept."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from sinklab.data.store.threads import get_fetcher_pool
from sinklab.files.known import list_objects
from sinklab.files.place import get_file_system
from sinklab.files.whole import atomic_write
from sinklab.record import UserError

MAX_RANGED_SHARE = 0.05  # of a file may be read by ranges while it is being fetched whole


class RemoteStore:
    """Sizes and marks of all files, of one listing; what is read later is of these files or refused."""

    def __init__(self, folder: Path):
        self.folder, self.storage = os.fspath(folder), get_file_system(folder)
        self.object_infos = list_objects(folder)

    def compute_version(self, files: Iterable[str]) -> str:
        """Of some files together, for processes to compare."""
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
                problem = f'{self.folder} has changed since it was opened: {file} is another file now, or gone'
                raise UserError(f'{problem}; bring it back and give the same command again') from error
            raise


class RemoteArray:
    """A file as an array whose slices are read when they are asked for; the whole of it is held to its digest."""

    def __init__(self, remote_store: RemoteStore, file: str, dtype: np.dtype, sha256: str):
        self.remote_store, self.file, self.dtype, self.sha256 = remote_store, file, dtype, sha256

    def __len__(self) -> int:
        return self.remote_store.object_infos[self.file].size // self.dtype.itemsize

    def __getitem__(self, index: slice) -> np.ndarray:
        start, end, _ = index.indices(len(self))
        content = self.remote_store.read(self.file, start * self.dtype.itemsize, end * self.dtype.itemsize)
        if end - start == len(self) and hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(
                f'{self.remote_store.folder} is damaged: {self.file} is not as it was written (its sha256 differs); bring the '
                'file anew, or give its prepare command again, which mends it'
            )
        return np.frombuffer(content, self.dtype)


class CachedArray(RemoteArray):
    """One that is fetched whole from when it is first asked for; until it is there, a little of it by ranges."""

    def __init__(self, remote_store: RemoteStore, file: str, dtype: np.dtype, sha256: str, folder: Path):
        super().__init__(remote_store, file, dtype, sha256)
        self.path, self.lock = folder / file, threading.Lock()
        self.num_ranged, self.fetch_future = 0, None
        if self.path.exists():  # whole, for it got its name when it was
            self.fetch_future = Future()
            self.fetch_future.set_result(np.memmap(self.path, dtype, 'r').view(np.ndarray))

    def __getitem__(self, index: slice) -> np.ndarray:
        if self.is_read_from_file(index) and (local_array := self.fetch_future.result()) is not None:
            return local_array[index]
        return super().__getitem__(index)

    def is_read_from_file(self, index: slice) -> bool:
        """Whether this slice is taken from the whole file, which may have to come first."""
        start, end, _ = index.indices(len(self))
        with self.lock:
            self.fetch_future = self.fetch_future or get_fetcher_pool().submit(self.fetch_file)
            if self.fetch_future.done() or self.num_ranged + end - start > MAX_RANGED_SHARE * len(self):
                return True
            self.num_ranged += end - start
        return False

    def fetch_file(self) -> np.ndarray | None:
        """The file on this machine's disk, where another process may have put it; None where that has no room."""
        content = None if self.path.exists() else super().__getitem__(slice(None))
        try:
            if not self.path.exists():
                with atomic_write(self.path) as unfinished:
                    unfinished.write_bytes(content)
            return np.memmap(self.path, self.dtype, 'r').view(np.ndarray)
        except OSError:
            return None
