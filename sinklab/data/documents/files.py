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
from sinklab.record import Refusal

FED = 1 << 14  # bytes of a .zst given to its decoder at once: what comes out may be much more
BRACES = re.compile(r'\{([^{}]*,[^{}]*)\}')


def matches(pattern: str) -> list[tuple[str, Path]]:
    """(name, path) of the files that match, sorted by name, which is relative to the pattern's fixed folder."""
    paths, roots = set(), []
    for plain in [pattern] if os.path.isfile(pattern) else alternatives(pattern):
        if glob.has_magic(plain) and not os.path.isfile(plain):
            paths.update(path for path in glob.glob(plain, recursive=True) if not os.path.isdir(path))
            roots.append(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(plain).parts)))
        else:
            paths.update([plain] if os.path.isfile(plain) else [])
            roots.append(os.path.dirname(plain))
    root = os.path.commonpath([os.path.abspath(root) for root in roots])
    return sorted((utf8_name(os.path.relpath(path, root)), Path(path)) for path in paths)


def alternatives(pattern: str) -> list[str]:
    """a.{txt,jsonl} -> a.txt, a.jsonl, as a shell has it."""
    if not (braces := BRACES.search(pattern)):
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [plain for part in braces[1].split(',') for plain in alternatives(f'{before}{part}{after}')]


def utf8_name(path: str) -> str:
    """A path may hold any bytes; a name is UTF-8."""
    return os.fsencode(Path(path).as_posix()).decode(errors='backslashreplace')


def library(name: str, what: object) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Refusal(f'{what} needs {name.split(".")[0]}; install it: {format_extra_command("data")}') from error


def line(words: object) -> str:
    return ' '.join(str(words).split())[:200]


@contextlib.contextmanager
def reading(path: Path, *damage: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, *damage) as error:
        absent = os.strerror(errno.ENOENT) if isinstance(error, FileNotFoundError) else ''
        if why := getattr(error, 'strerror', None) or absent:
            raise Refusal(f'{path} cannot be read: {why}') from error
        raise Refusal(f'{path} is cut off or damaged ({line(error)}); fetch it again, or leave it out') from error


@contextlib.contextmanager
def content(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the content, the file that it comes from)"""
    with reading(path), path.open('rb') as file:
        yield DECOMPRESS[path.suffix](file, path) if path.suffix in DECOMPRESS else file, file


def gunzip(file: BinaryIO, _: Path) -> BinaryIO:
    return io.BufferedReader(gzip.GzipFile(fileobj=file))


def unzstd(file: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(Flow(frames(file, library('zstandard', path))), 1 << 17)


def frames(file: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """The content of a .zst, frame by frame: zstandard's own reader takes a file that is cut off for a whole one."""
    frame = None
    while fed := file.read(FED):
        while fed:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                yield frame.decompress(fed)
            except zstandard.ZstdError as error:
                raise EOFError(line(error)) from error
            fed, frame = (frame.unused_data, None) if frame.eof else (b'', frame)
    if frame:
        raise EOFError('its last frame does not end')


class Flow(io.RawIOBase):
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
        taken = min(len(buffer), len(self.chunk))
        buffer[:taken], self.chunk = self.chunk[:taken], self.chunk[taken:]
        return taken


DECOMPRESS = {'.gz': gunzip, '.zst': unzstd}
