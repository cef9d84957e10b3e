"""Files: those that match a pattern, and their content, compressed or not, as a stream."""

import contextlib
import errno
import glob
import gzip
import importlib
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from sinklab.install import format_extra_command
from sinklab.record import UserError

ZSTD_READ_BYTES = 1 << 14  # bytes of a .zst given to its decoder at once: what comes out may be much more
BRACES = re.compile(r'\{([^{}]*,[^{}]*)\}')


def glob_files(pattern: str) -> list[tuple[str, Path]]:
    """(name, path) of the files that match, sorted by name, which is relative to the pattern's fixed folder."""
    paths, roots = set(), []
    for alternative in [pattern] if os.path.isfile(pattern) else expand_braces(pattern):
        if glob.has_magic(alternative) and not os.path.isfile(alternative):
            paths.update(path for path in glob.glob(alternative, recursive=True) if not os.path.isdir(path))
            roots.append(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(alternative).parts)))
        else:
            paths.update([alternative] if os.path.isfile(alternative) else [])
            roots.append(os.path.dirname(alternative))
    root = os.path.commonpath([os.path.abspath(root) for root in roots])
    return sorted((make_utf8_name(os.path.relpath(path, root)), Path(path)) for path in paths)


def expand_braces(pattern: str) -> list[str]:
    """a.{txt,jsonl} -> a.txt, a.jsonl, as a shell has it."""
    if not (braces := BRACES.search(pattern)):
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [expanded for part in braces[1].split(',') for expanded in expand_braces(f'{before}{part}{after}')]


def make_utf8_name(path: str) -> str:
    """A path may hold any bytes; a name is UTF-8."""
    return os.fsencode(Path(path).as_posix()).decode(errors='backslashreplace')


def import_library(name: str, needed_by: object) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f'{needed_by} needs {name.split(".")[0]}; install it: {format_extra_command("data")}') from error


def shorten_text(text: object) -> str:
    return ' '.join(str(text).split())[:200]


@contextlib.contextmanager
def translate_read_errors(path: Path, *damage_errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, *damage_errors) as error:
        default_reason = os.strerror(errno.ENOENT) if isinstance(error, FileNotFoundError) else ''
        if reason := getattr(error, 'strerror', None) or default_reason:
            raise UserError(f'{path} cannot be read: {reason}') from error
        raise UserError(f'{path} is cut off or damaged ({shorten_text(error)}); fetch it again, or leave it out') from error


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the content, the file that it comes from)"""
    with translate_read_errors(path), path.open('rb') as file:
        yield DECOMPRESSORS[path.suffix](file, path) if path.suffix in DECOMPRESSORS else file, file


def open_gzip(file: BinaryIO, _: Path) -> BinaryIO:
    return io.BufferedReader(gzip.GzipFile(fileobj=file))


def open_zstd(file: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(IteratorFile(iter_zstd_content(file, import_library('zstandard', path))), 1 << 17)


def iter_zstd_content(file: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """The content of a .zst, frame by frame: zstandard's own reader takes a file that is cut off for a whole one."""
    frame = None
    while data := file.read(ZSTD_READ_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(shorten_text(error)) from error
            data, frame = (frame.unused_data, None) if frame.eof else (b'', frame)
    if frame:
        raise EOFError('its last frame does not end')


class IteratorFile(io.RawIOBase):
    """A file of what an iterator brings."""

    def __init__(self, chunks: Iterable[bytes]):
        self.chunks, self.chunk = iter(chunks), memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.chunk:
            try:
                self.chunk = memoryview(next(self.chunks))
            except StopIteration:
                return 0
        num_bytes = min(len(buffer), len(self.chunk))
        buffer[:num_bytes], self.chunk = self.chunk[:num_bytes], self.chunk[num_bytes:]
        return num_bytes


DECOMPRESSORS = {'.gz': open_gzip, '.zst': open_zstd}
