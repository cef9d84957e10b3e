"""Lines that are added one by one: to a file on a disk; in a bucket, where nothing can be added, to segments.

A segment is written anew with all that it holds whenever something has come, until it is large; then the next begins.
Their names count up, from attempt to attempt, so that what is read of all of them is what was written, once.
"""

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from sinklab.files import regular
from sinklab.files.known import listing
from sinklab.files.place import is_remote, storage
from sinklab.files.run_files import is_cut_off
from sinklab.files.tree import content

EVERY = 20.0  # seconds, at most, until a line is in the bucket, beside what a request takes
LARGE = 1 << 20  # bytes of a segment that gets no more lines
Check = Callable[[], None]


class Appended:
    """A file on a disk that lines are added to.

    What a crash has cut off at its end is removed: followed by other lines, it would look like damage. Whoever reads
    the file while it grows has not used it, as it has no end.
    """

    def __init__(self, path: Path, check: Check):
        check()
        self.file = path.open('ab')
        content = path.read_bytes()
        last = content.rpartition(b'\n')[2]
        if is_cut_off(last):
            self.file.truncate(len(content) - len(last))
        elif last:
            self.file.write(b'\n')

    def append(self, line: bytes) -> None:
        self.file.write(line + b'\n')
        self.file.flush()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class Segmented:
    """Segments in a bucket, written in the background; `check` is asked before, and raises what ends the writing."""

    def __init__(self, path: Path, check: Check):
        self.folder, self.check = segments(path), check
        self.number = max((number_of(name) for name, _ in known(path)), default=0) + 1
        self.lines, self.written, self.error, self.mark = b'', 0, None, ''
        self.adding, self.writing = threading.Lock(), threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.live, name='metrics', daemon=True)
        self.thread.start()

    def append(self, line: bytes) -> None:
        if self.error:
            raise self.error
        with self.adding:
            self.lines += line + b'\n'

    def live(self) -> None:
        while not self.ended.wait(EVERY):
            try:
                self.sync()
            except Exception as error:  # of whatever kind: it is raised where lines are added
                self.error = error
                return

    def sync(self) -> None:
        """Until all lines that have come are in the bucket."""
        with self.writing:
            with self.adding:
                lines = self.lines
            if len(lines) == self.written:
                return
            self.check()
            self.put(os.fspath(self.folder / f'{self.number:08}.jsonl'), lines)
            self.written = len(lines)
            if self.written >= LARGE:
                with self.adding:
                    self.lines, self.written, self.number = self.lines[self.written :], 0, self.number + 1
                self.mark = ''

    def put(self, path: str, lines: bytes) -> None:
        """Writes a segment in the place of what was written of it before, and of nothing else."""
        mark = storage(self.folder).write_marked(path, lines, self.mark)
        if not mark:
            self.check()
            raise FileExistsError(errno.EEXIST, 'another process has written these numbers', path)
        self.mark = mark

    def close(self) -> None:
        self.ended.set()
        self.thread.join()
        self.sync()


def adding(path: Path, check: Check = lambda: None) -> Appended | Segmented:
    return (Segmented if is_remote(path) else Appended)(path, check)


def segments(path: Path) -> Path:
    return path.with_suffix('')


def known(path: Path) -> list[tuple[str, int]]:
    """(name, bytes) of the segments that there are."""
    found = listing(segments(path)).items()
    return sorted((name, about.size) for name, about in found if number_of(name) is not None)


def number_of(name: str) -> int | None:
    """Return the number of a segment; None of an object that is none."""
    return int(match[1]) if (match := re.fullmatch(r'([0-9]{8,12})\.jsonl', name)) else None


def read(path: Path, start: int = 0) -> bytes:
    """All that is there now, from a byte on."""
    if not is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            return regular.read(path, start)
        return b''
    found, first = [], 0
    for name, size in known(path):
        if first + size > start:
            found.append(content(segments(path) / name)[max(0, start - first) :])
        first += size
    return b''.join(found)
