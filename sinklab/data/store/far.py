"""The files of a store in a bucket as they were when it was opened, read by ranges, or fetched to be kept."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from sinklab.data.store.threads import fetchers
from sinklab.files.known import listing
from sinklab.files.place import storage
from sinklab.files.whole import whole
from sinklab.record import Refusal

BESIDE = 0.05  # of a file may be read by ranges while it is being fetched whole


class Far:
    """Sizes and marks of all files, of one listing; what is read later is of these files or refused."""

    def __init__(self, folder: Path):
        self.folder, self.storage = os.fspath(folder), storage(folder)
        self.known = listing(folder)

    def mark(self, files: Iterable[str]) -> str:
        """Of some files together, for processes to compare."""
        return hashlib.sha256(repr([(file, self.known.get(file)) for file in files]).encode()).hexdigest()[:16]

    def read(self, file: str, start: int = 0, end: int | None = None) -> bytes:
        known = self.known[file]
        end = known.size if end is None else end
        if start >= end:
            return b''
        try:
            return self.storage.read_range(f'{self.folder}/{file}', start, end, known.version)
        except OSError as error:
            if error.errno == errno.ESTALE:
                words = f'{self.folder} has changed since it was opened: {file} is another file now, or gone'
                raise Refusal(f'{words}; bring it back and give the same command again') from error
            raise


class Ranged:
    """A file as an array whose slices are read when they are asked for; the whole of it is held to its digest."""

    def __init__(self, far: Far, file: str, kind: np.dtype, sha256: str):
        self.far, self.file, self.kind, self.sha256 = far, file, kind, sha256

    def __len__(self) -> int:
        return self.far.known[self.file].size // self.kind.itemsize

    def __getitem__(self, where: slice) -> np.ndarray:
        start, end, _ = where.indices(len(self))
        content = self.far.read(self.file, start * self.kind.itemsize, end * self.kind.itemsize)
        if end - start == len(self) and hashlib.sha256(content).hexdigest() != self.sha256:
            raise Refusal(
                f'{self.far.folder} is damaged: {self.file} is not as it was written (its sha256 differs); bring the '
                'file anew, or give its prepare command again, which mends it'
            )
        return np.frombuffer(content, self.kind)


class Kept(Ranged):
    """One that is fetched whole from when it is first asked for; until it is there, a little of it by ranges."""

    def __init__(self, far: Far, file: str, kind: np.dtype, sha256: str, folder: Path):
        super().__init__(far, file, kind, sha256)
        self.path, self.lock = folder / file, threading.Lock()
        self.spent, self.fetched = 0, None
        if self.path.exists():  # whole, for it got its name when it was
            self.fetched = Future()
            self.fetched.set_result(np.memmap(self.path, kind, 'r').view(np.ndarray))

    def __getitem__(self, where: slice) -> np.ndarray:
        if self.waits(where) and (local := self.fetched.result()) is not None:
            return local[where]
        return super().__getitem__(where)

    def waits(self, where: slice) -> bool:
        """Whether this slice is taken from the whole file, which may have to come first."""
        start, end, _ = where.indices(len(self))
        with self.lock:
            self.fetched = self.fetched or fetchers().submit(self.fetch)
            if self.fetched.done() or self.spent + end - start > BESIDE * len(self):
                return True
            self.spent += end - start
        return False

    def fetch(self) -> np.ndarray | None:
        """The file on this machine's disk, where another process may have put it; None where that has no room."""
        content = None if self.path.exists() else super().__getitem__(slice(None))
        try:
            if not self.path.exists():
                with whole(self.path) as unfinished:
                    unfinished.write_bytes(content)
            return np.memmap(self.path, self.kind, 'r').view(np.ndarray)
        except OSError:
            return None
