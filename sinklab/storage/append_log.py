"""The append-only log of a run directory, metrics.jsonl: a file on a disk, segments in a bucket.

In a bucket, a log consists of segments. A segment is an object that is rewritten as a whole whenever lines have been
added, until it has SEGMENT_BYTES; then the next segment begins. The numbers of segments increase from attempt to
attempt, so the concatenated segments have each line exactly once.
"""

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from sinklab.storage.paths import get_file_system, is_remote, list_objects
from sinklab.storage.run_file_schemas import is_truncated
from sinklab.storage.untrusted_files import read_regular_file

FLUSH_SECONDS = 20.0  # seconds until a line is in the bucket, at most, plus the time of a request
SEGMENT_BYTES = 1 << 20  # bytes after which a segment gets no more lines
Check = Callable[[], None]


class LocalAppendLog:
    """A file on a disk to which lines are appended.

    A last line that a crash truncated is removed: followed by other lines, it would look like damage. Processes that
    read the file while it grows have not used that line, since it has no line break.
    """

    def __init__(self, path: Path, check: Check):
        check()
        self.file = path.open('ab')
        content = path.read_bytes()
        last_line = content.rpartition(b'\n')[2]
        if is_truncated(last_line):
            self.file.truncate(len(content) - len(last_line))
        elif last_line:
            self.file.write(b'\n')

    def append(self, line: bytes) -> None:
        self.file.write(line + b'\n')
        self.file.flush()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class RemoteAppendLog:
    """Segments in a bucket, which a background thread writes.

    `check` is called before each write; an exception of `check` ends the writing.
    """

    def __init__(self, path: Path, check: Check):
        self.folder, self.check = get_segment_folder(path), check
        self.segment_number = max((parse_segment_number(name) for name, _ in list_segments(path)), default=0) + 1
        self.buffer, self.flushed_bytes, self.error, self.version = b'', 0, None, ''
        self.buffer_lock, self.flush_lock = threading.Lock(), threading.Lock()
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self.flush_periodically, name='metrics', daemon=True)
        self.thread.start()

    def append(self, line: bytes) -> None:
        if self.error:
            raise self.error
        with self.buffer_lock:
            self.buffer += line + b'\n'

    def flush_periodically(self) -> None:
        while not self.stop_event.wait(FLUSH_SECONDS):
            try:
                self.sync()
            except Exception as error:  # of any type: the next `append` raises it
                self.error = error
                return

    def sync(self) -> None:
        """Wait until all appended lines are in the bucket."""
        with self.flush_lock:
            with self.buffer_lock:
                content = self.buffer
            if len(content) == self.flushed_bytes:
                return
            self.check()
            self.write_segment(os.fspath(self.folder / f'{self.segment_number:08}.jsonl'), content)
            self.flushed_bytes = len(content)
            if self.flushed_bytes >= SEGMENT_BYTES:
                with self.buffer_lock:
                    self.buffer, self.flushed_bytes, self.segment_number = (
                        self.buffer[self.flushed_bytes :],
                        0,
                        self.segment_number + 1,
                    )
                self.version = ''

    def write_segment(self, path: str, content: bytes) -> None:
        """Write a segment if its object is the version that this log wrote last, or does not exist.

        Raises:
            FileExistsError: Another process has written the segment.
        """
        version = get_file_system(self.folder).write_if_match(path, content, self.version)
        if not version:
            self.check()
            raise FileExistsError(errno.EEXIST, 'another process has written these numbers', path)
        self.version = version

    def close(self) -> None:
        self.stop_event.set()
        self.thread.join()
        self.sync()


def open_append_log(path: Path, check: Check = lambda: None) -> LocalAppendLog | RemoteAppendLog:
    return (RemoteAppendLog if is_remote(path) else LocalAppendLog)(path, check)


def get_segment_folder(path: Path) -> Path:
    return path.with_suffix('')


def list_segments(path: Path) -> list[tuple[str, int]]:
    """Return (name, size in bytes) of all segments, in order."""
    objects = list_objects(get_segment_folder(path)).items()
    return sorted((name, info.size) for name, info in objects if parse_segment_number(name) is not None)


def parse_segment_number(name: str) -> int | None:
    """Return the number of a segment; None for another object."""
    return int(match[1]) if (match := re.fullmatch(r'([0-9]{8,12})\.jsonl', name)) else None


def read_log(path: Path, start: int = 0) -> bytes:
    """Return the current content from byte `start` on; b'' if there is no log."""
    if not is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            return read_regular_file(path, start)
        return b''
    parts, segment_start = [], 0
    for name, size in list_segments(path):
        if segment_start + size > start:
            parts.append(read_regular_file(get_segment_folder(path) / name)[max(0, start - segment_start) :])
        segment_start += size
    return b''.join(parts)
