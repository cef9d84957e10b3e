"""Files of a data source, on a disk or in a bucket: matching of patterns, and decompression."""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import importlib
import io
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from sinklab.errors import UserError, format_error, format_extra_command
from sinklab.storage.paths import find_common_folder, get_file_system, is_remote, make_relative, parse_path

BRACES = re.compile(r'\{([^{}]*,[^{}]*)\}')
FIXED_FOLDER = re.compile(r'(?:[^*?[]*/)?')  # the folder before the first wildcard of a pattern
BEGINNING_BYTES = 1 << 13  # bytes of a file of unknown format that show whether it is text


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file that a pattern matches.

    Attributes:
        name: Path relative to the part of the pattern without wildcards, in UTF-8.
        path: A local path, or one in a bucket.
        size: Bytes.
        version: What changes with the content: the time of the last change in ns; in a bucket, a digest.
    """

    name: str
    path: Path
    size: int
    version: int | str


def match_files(pattern: str) -> list[SourceFile]:
    """Return the files that match a pattern with *, **, ?, [abc] and {a,b}, sorted by name.

    Raises:
        UserError: A file or the bucket cannot be read.
    """
    find_files = find_objects if is_remote(pattern) else find_local_files
    infos, roots = {}, []
    for alternative in [pattern] if pattern in find_files(pattern) else expand_braces(pattern):
        matches = find_files(alternative)
        is_literal = alternative in matches or not glob.has_magic(alternative)
        roots.append(os.path.dirname(alternative) if is_literal else FIXED_FOLDER.match(alternative)[0])
        infos |= matches
    root = find_common_folder([parse_path(root) for root in roots])
    files = [
        SourceFile(make_utf8_name(make_relative(parse_path(path), root)), parse_path(path), *info)
        for path, info in infos.items()
    ]
    return sorted(files, key=lambda file: file.name)


def expand_braces(pattern: str) -> list[str]:
    """Expand braces as a shell does: a.{txt,jsonl} -> a.txt, a.jsonl."""
    if not (braces := BRACES.search(pattern)):
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [expanded for part in braces[1].split(',') for expanded in expand_braces(f'{before}{part}{after}')]


def find_local_files(pattern: str) -> dict[str, tuple[int, int]]:
    """Return (size, time of the last change) by path of the files that match a pattern without braces."""
    paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    infos = {}
    for path in paths:
        if not os.path.isdir(path):
            with translate_read_errors(path):
                status = os.stat(path)
            infos[path] = status.st_size, status.st_mtime_ns
    return infos


def find_objects(pattern: str) -> dict[str, tuple[int, str]]:
    """Return (size, digest) by URL of the objects that match a pattern without braces, as on a disk."""
    file_system = get_file_system()
    with translate_read_errors(pattern):
        if glob.has_magic(pattern) and not file_system.isfile(pattern):
            infos = file_system.glob(pattern, detail=True)
        else:
            infos = {pattern.partition('://')[2]: file_system.info(pattern)} if file_system.isfile(pattern) else {}
    return {
        f'gs://{name}': (info['size'], info.get('md5Hash') or info['crc32c'])
        for name, info in infos.items()
        if info['type'] == 'file' and ('/.' not in name or '/.' in pattern)  # * matches no leading dot
    }


def make_utf8_name(path: str) -> str:
    """Convert a path to a valid UTF-8 name by escaping bytes that are not UTF-8."""
    return os.fsencode(path).decode(errors='backslashreplace')


def import_library(name: str, needed_by: object) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f'{needed_by} needs {name.partition(".")[0]}; install it: {format_extra_command("data")}'
        ) from error


@contextlib.contextmanager
def translate_read_errors(path: object, *damage_errors: type[Exception]) -> Iterator[None]:
    """Turn errors of reading a file into a UserError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f'{path} cannot be read: there is no such file') from error
    except (EOFError, OSError, zlib.error, *damage_errors) as error:
        if reason := getattr(error, 'strerror', None):
            raise UserError(f'{path} cannot be read: {reason}') from error
        raise UserError(
            f'{path} cannot be read, or is truncated or damaged ({format_error(error)}); get it again, or remove it'
        ) from error


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file and yield (decompressed content, underlying file), both as binary files.

    The position of the underlying file measures progress in bytes on disk.
    """
    with translate_read_errors(path), path.open('rb') as file:
        if path.suffix == '.gz':
            yield io.BufferedReader(gzip.GzipFile(fileobj=file)), file
        elif path.suffix == '.zst':
            yield (
                io.BufferedReader(import_library('pyarrow', path).CompressedInputStream(file, 'zstd'), 1 << 17),
                file,
            )
        else:
            yield file, file


def is_text_file(path: Path) -> bool:
    """Return whether a file begins as UTF-8 text does, without NUL bytes; a pipe or a device is no text file."""
    if not path.is_file():
        return False
    with translate_read_errors(path), path.open('rb') as file:
        beginning = file.read(BEGINNING_BYTES)
    try:
        return '\0' not in codecs.getincrementaldecoder('utf-8')().decode(beginning)  # it may end within a character
    except UnicodeDecodeError:
        return False
