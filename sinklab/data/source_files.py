"""Files of a data source, local or in a bucket: glob matching, decompression and prefetched ranges."""

import codecs
import collections
import contextlib
import dataclasses
import errno
import fnmatch
import glob
import gzip
import importlib
import io
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import BinaryIO

from sinklab.errors import UserError, format_error, format_extra_command
from sinklab.storage.paths import (
    ObjectInfo,
    get_file_system,
    list_objects,
    parse_object_info,
    parse_path,
)
from sinklab.thread_pools import get_reader_pool

ZSTD_READ_BYTES = 1 << 14  # compressed bytes per decoder call; small, because the output may be much larger
BRACES = re.compile(r'\{([^{}]*,[^{}]*)\}')


def glob_files(pattern: str) -> list[tuple[str, Path]]:
    """Return (name, path) of the matching files, sorted by name.

    A name is the path relative to the part of the pattern without wildcards.
    """
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
    """Expand braces as a shell does: a.{txt,jsonl} -> a.txt, a.jsonl."""
    if not (braces := BRACES.search(pattern)):
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [expanded for part in braces[1].split(',') for expanded in expand_braces(f'{before}{part}{after}')]


def make_utf8_name(path: str) -> str:
    """Convert a path to a valid UTF-8 name by escaping bytes that are not UTF-8."""
    return os.fsencode(Path(path).as_posix()).decode(errors='backslashreplace')


def import_library(name: str, needed_by: object) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f'{needed_by} needs {name.split(".")[0]}; install it: {format_extra_command("data")}'
        ) from error


@contextlib.contextmanager
def translate_read_errors(path: Path, *damage_errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, *damage_errors) as error:
        default_reason = os.strerror(errno.ENOENT) if isinstance(error, FileNotFoundError) else ''
        if reason := getattr(error, 'strerror', None) or default_reason:
            raise UserError(f'{path} cannot be read: {reason}') from error
        raise UserError(
            f'{path} is truncated or damaged ({format_error(error)}); download it again, or remove it'
        ) from error


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file and yield (decompressed content, underlying file), both as binary files.

    The position of the underlying file measures progress in bytes on disk.
    """
    with translate_read_errors(path), path.open('rb') as file:
        yield DECOMPRESSORS[path.suffix](file, path) if path.suffix in DECOMPRESSORS else file, file


def open_gzip(file: BinaryIO, _: Path) -> BinaryIO:
    return io.BufferedReader(gzip.GzipFile(fileobj=file))


def open_zstd(file: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(IteratorFile(iter_zstd_content(file, import_library('zstandard', path))), 1 << 17)


def iter_zstd_content(file: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """Decompress a .zst file frame by frame and raise EOFError if it is truncated or damaged.

    The stream reader of zstandard does not report a truncated file.
    """
    frame = None
    while data := file.read(ZSTD_READ_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(format_error(error)) from error
            data, frame = (frame.unused_data, None) if frame.eof else (b'', frame)
    if frame:
        raise EOFError('its last frame is incomplete')


class IteratorFile(io.RawIOBase):
    """Binary file over an iterator of chunks."""

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


BEGINNING_BYTES = 1 << 13  # bytes of a file of unknown format that show whether it is text


def is_text_file(path: 'Path | RemoteFile') -> bool:
    """Return whether a file begins as UTF-8 text does, without NUL bytes; a pipe or a device is no text file."""
    if isinstance(path, Path) and not path.is_file():
        return False
    if isinstance(path, RemoteFile):  # fetches no more than the beginning
        path = dataclasses.replace(path, size=min(path.size, BEGINNING_BYTES))
    with translate_read_errors(path), path.open('rb') as file:
        beginning = file.read(BEGINNING_BYTES)
    try:
        return '\0' not in codecs.getincrementaldecoder('utf-8')().decode(beginning)  # it may end within a character
    except UnicodeDecodeError:
        return False


BLOCK_BYTES = 1 << 22  # bytes per ranged read
MAX_BLOCKS = 8  # blocks of a file in memory; several, because a Parquet reader alternates between places
PREFETCH_BLOCKS = 2  # blocks that are prefetched while one is used
CHANGED_MESSAGE = 'has changed since the command started; stop other writers, and prepare it in another folder'


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file in a bucket as listed, with the methods of a path that readers of sources need."""

    url: str
    size: int
    version: str  # object version of the storage, which changes whenever the object is overwritten

    def __str__(self) -> str:
        return self.url

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def open(self, _: str = 'rb') -> BinaryIO:
        return io.BufferedReader(RangeReader(self.size, self.read_range), 1 << 17)

    def read_range(self, start: int, end: int) -> bytes:
        try:
            return get_file_system(self.url).read_range(self.url, start, end, self.version)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise UserError(f'{self.url} {CHANGED_MESSAGE}') from error
            raise


class RangeReader(io.RawIOBase):
    """Binary file that is read in blocks and prefetches the next blocks on sequential access."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]):
        self.size, self.read_range, self.position = size, read, 0
        self.blocks: collections.OrderedDict[int, Future] = collections.OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: memoryview) -> int:
        if self.position >= self.size:
            return 0
        number, start = divmod(self.position, BLOCK_BYTES)
        part = memoryview(self.get_block(number))[start : start + len(buffer)]
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)

    def get_block(self, number: int) -> bytes:
        is_sequential = number - 1 in self.blocks or number == self.position == 0
        for block_number in range(number, number + 1 + PREFETCH_BLOCKS * is_sequential):
            if block_number not in self.blocks and block_number * BLOCK_BYTES < self.size:
                start, end = block_number * BLOCK_BYTES, min((block_number + 1) * BLOCK_BYTES, self.size)
                self.blocks[block_number] = get_reader_pool().submit(self.read_range, start, end)
        self.blocks.move_to_end(number)
        while len(self.blocks) > MAX_BLOCKS:
            self.blocks.popitem(last=False)
        return self.blocks[number].result()


def glob_objects(pattern: str) -> list[tuple[str, RemoteFile]]:
    """Return (name, file) of the matching objects of a bucket, as `glob_files` does on a disk.

    Raises:
        UserError: The bucket does not exist or is a wildcard, or an object cannot be read.
    """
    parse_path(pattern)
    remote_files, roots = {}, []
    for alternative in [pattern] if find_object(pattern) else expand_braces(pattern):
        parts, remote_file = alternative.split('/'), find_object(alternative)
        if remote_file or not glob.has_magic(alternative):
            roots.append(parts[:-1])
            remote_files |= {alternative: remote_file} if remote_file else {}
            if not remote_file:
                list_matching_objects(alternative, roots[-1], parts[-1])  # raises if the bucket does not exist
        else:
            roots.append([*itertools.takewhile(lambda part: not glob.has_magic(part), parts)])
            remote_files |= find_matching_objects(alternative, roots[-1])
    common = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*roots, strict=False))
    root = ''.join(f'{names[0]}/' for names in common)
    return sorted(((url.removeprefix(root), entry) for url, entry in remote_files.items()), key=lambda pair: pair[0])


def find_object(url: str) -> RemoteFile | None:
    """Return the object of a URL, or None if there is none.

    Raises:
        UserError: The bucket is a wildcard, or the storage cannot be read.
    """
    bucket = url.split('/')[2]
    if glob.has_magic(bucket):
        raise UserError(f'{url} has a pattern as its bucket; give the name of one bucket')
    if '{' in bucket:
        return None
    with translate_read_errors(url):
        try:
            info = get_file_system(url).info(url)
            return (
                make_remote_file(url, parse_object_info(info))
                if info['type'] == 'file' and not url.endswith('/')
                else None
            )
        except FileNotFoundError:
            return None


def find_matching_objects(pattern: str, root_parts: list[str]) -> dict[str, RemoteFile]:
    """Return the objects that match a pattern, by URL."""
    rest = pattern.split('/')[len(root_parts) :]
    prefix = '' if rest[0] == '**' else ''.join(itertools.takewhile(lambda letter: letter not in '*?[', rest[0]))
    infos = {
        name: info
        for name, info in list_matching_objects(pattern, root_parts, prefix).items()
        if is_glob_match(name.split('/'), rest)
    }
    return {
        f'{"/".join(root_parts)}/{name}': make_remote_file(f'{"/".join(root_parts)}/{name}', infos[name])
        for name in infos
    }


def list_matching_objects(pattern: str, folder: list[str], prefix: str) -> dict[str, ObjectInfo]:
    """List the objects below a folder whose names begin with a prefix; {} for a missing folder.

    Raises:
        UserError: The bucket does not exist.
    """
    with translate_read_errors(pattern):
        try:
            return list_objects('/'.join(folder), prefix)
        except FileNotFoundError:  # the folder is missing; a missing bucket raises ENXIO, which is translated
            return {}


def make_remote_file(url: str, info: ObjectInfo) -> RemoteFile:
    if info.is_decompressed:
        raise UserError(f'{url} is decompressed by its storage (Content-Encoding: gzip); upload it as a .gz file')
    return RemoteFile(url, info.size, info.version)


def is_glob_match(parts: list[str], pattern: list[str]) -> bool:
    """Match the parts of a path as `glob` does.

    A ** matches any number of folders. Wildcards do not match a leading dot.
    """
    if not pattern or not parts:
        return not pattern and not parts
    is_hidden = parts[0].startswith('.') and not pattern[0].startswith('.')
    if pattern == ['**']:  # a trailing ** matches everything below, but not the folder itself
        return not any(part.startswith('.') for part in parts)
    if pattern[0] == '**':
        return is_glob_match(parts, pattern[1:]) or (not is_hidden and is_glob_match(parts[1:], pattern))
    return not is_hidden and fnmatch.fnmatchcase(parts[0], pattern[0]) and is_glob_match(parts[1:], pattern[1:])
