"""Append-only logs of lines: a file on a disk, segments in a bucket.

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

from sinklab.storage import untrusted_files
from sinklab.storage.directories import read_file
from sinklab.storage.object_info import list_objects
from sinklab.storage.paths import get_file_system, is_remote
from sinklab.storage.run_files import is_truncated

FLUSH_SECONDS = 20.0  # seconds, at most, until a line is in the bucket, beside what a request takes
SEGMENT_BYTES = 1 << 20  # bytes of a segment that gets no more lines
Check = Callable[[], None]


class LocalAppendLog:
    """A file on a disk to which lines are appended.

    What a crash has cut off at its end is removed: followed by other lines, it would look like damage. Whoever reads
    the file while it grows has not used it, as it has no end.
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
    """Segments in a bucket, written in the background; `check` is called before, and raises to end the writing."""

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
            except Exception as error:  # of whatever kind: it is raised where lines are added
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
        """Writes a segment in the place of what was written of it before, and of nothing else."""
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
    """Return (name, bytes) of all segments."""
    objects = list_objects(get_segment_folder(path)).items()
    return sorted((name, info.size) for name, info in objects if parse_segment_number(name) is not None)


def parse_segment_number(name: str) -> int | None:
    """Return the number of a segment; None of an object that is none."""
    return int(match[1]) if (match := re.fullmatch(r'([0-9]{8,12})\.jsonl', name)) else None


def read_log(path: Path, start: int = 0) -> bytes:
    """Return the current content, from byte `start` on."""
    if not is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            return untrusted_files.read_regular_file(path, start)
        return b''
    parts, segment_start = [], 0
    for name, size in list_segments(path):
        if segment_start + size > start:
            parts.append(read_file(get_segment_folder(path) / name)[max(0, start - segment_start) :])
        segment_start += size
    return b''.join(parts)
