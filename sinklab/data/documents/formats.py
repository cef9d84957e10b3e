"""Records of files - a whole text, lines of JSON, rows of a table - one at a time, whatever the size of the file."""

import contextlib
import dataclasses
import glob
import gzip
import importlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from sinklab.record import Refusal

FED = 1 << 14  # bytes of a .zst given to its decoder at once: what comes out may be much more
ROWS = 256  # of a table, held at once
BRACES = re.compile(r'\{([^{}]*,[^{}]*)\}')


class Fault(ValueError):
    """Why one record cannot be used, others of its file being fine."""


@dataclasses.dataclass(frozen=True)
class Format:
    unit: str  # what a record is called; '' where it is the whole file
    records: Callable[[Path, list[str]], Iterator[tuple[int, Any, int]]]  # (number, record, bytes on disk)
    fields: Callable[[Any], dict[str, Any]]  # of a record, or a Fault


def found(pattern: str) -> list[tuple[str, Path]]:
    """(name, path) of the files that match, sorted by name, which is relative to the pattern's fixed folder."""
    paths, roots = set(), []
    for plain in [pattern] if os.path.isfile(pattern) else alternatives(pattern):
        if os.path.isfile(plain) or not glob.has_magic(plain):
            paths |= {plain} if os.path.isfile(plain) else set()
            roots.append(os.path.dirname(plain))
        else:
            paths |= {path for path in glob.glob(plain, recursive=True) if not os.path.isdir(path)}
            roots.append(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(plain).parts)))
    root = os.path.commonpath([os.path.abspath(root) for root in roots])
    return sorted((shown(os.path.relpath(path, root)), Path(path)) for path in paths)


def alternatives(pattern: str) -> list[str]:
    """a.{txt,jsonl} -> a.txt, a.jsonl, as a shell has it."""
    if not (braces := BRACES.search(pattern)):
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [plain for part in braces[1].split(',') for plain in alternatives(f'{before}{part}{after}')]


def shown(path: str) -> str:
    """A path may hold any bytes; a name is UTF-8."""
    return os.fsencode(Path(path).as_posix()).decode(errors='backslashreplace')


def library(name: str, what: object) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Refusal(f'{what} needs {name.split(".")[0]}; pip install "sinklab[data]"') from error


def line(words: object) -> str:
    return ' '.join(str(words).split())[:200]


@contextlib.contextmanager
def reading(path: Path, *damage: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, *damage) as error:
        if getattr(error, 'strerror', None):
            raise Refusal(f'{path} cannot be read: {error.strerror}') from error
        raise Refusal(f'{path} is cut off or damaged ({line(error)}); fetch it again, or leave it out') from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the content, the file that it comes from)"""
    with reading(path), path.open('rb') as file:
        yield OPENERS.get(path.suffix, lambda file, path: file)(file, path), file


def gunzipped(file: BinaryIO, _: Path) -> BinaryIO:
    return io.BufferedReader(gzip.GzipFile(fileobj=file))


def unzstd(file: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(Flow(frames(file, library('zstandard', path))), 1 << 17)


def frames(file: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """zstandard's own reader of files takes a cut for the end."""
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


def whole(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    with opened(path) as (content, file):
        yield 0, content.read(), os.fstat(file.fileno()).st_size


def lines(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    """Lines that are not blank; of a compressed file, the first line of a block stands for the block."""
    behind = 0
    with opened(path) as (content, file):
        for number, text in enumerate(content, 1):
            if text.strip():
                behind, before = file.tell(), behind
                yield number, text, behind - before


def rows(path: Path, columns: list[str]) -> Iterator[tuple[int, Any, int]]:
    parquet, pyarrow = library('pyarrow.parquet', path), library('pyarrow', path)
    with reading(path, pyarrow.ArrowException), path.open('rb') as file:
        size = os.fstat(file.fileno()).st_size
        table = parquet.ParquetFile(file, buffer_size=1 << 20, page_checksum_verification=True)
        for name in columns:
            if name not in table.schema_arrow.names:
                raise Refusal(f'{path} has no column {name!r} (columns: {", ".join(table.schema_arrow.names)})')
        groups = range(table.num_row_groups)  # one by one: asked for all, it reads the whole file first
        batches = (batch for group in groups for batch in table.iter_batches(ROWS, [group], columns))
        count = table.metadata.num_rows
        for number, row in enumerate(itertools.chain.from_iterable(batch.to_struct_array() for batch in batches)):
            yield number + 1, row, size * (number + 1) // count - size * number // count


def decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Fault(f'is not UTF-8 (byte {error.start})') from error


def text(content: bytes) -> dict[str, Any]:
    return {'text': decoded(content)}


def parsed(content: bytes, objects: Callable | None = None) -> dict[str, Any]:
    try:
        fields = json.loads(decoded(content).removeprefix('\ufeff'), object_pairs_hook=objects)
    except Fault:
        raise
    except (ValueError, RecursionError) as error:
        raise Fault(f'is not JSON ({line(error)})') from error
    if not isinstance(fields, dict):
        raise Fault('is not a JSON object')
    return fields


def values(row: Any) -> dict[str, Any]:
    try:
        return row.as_py()
    except UnicodeDecodeError as error:
        raise Fault(f'is not UTF-8 (byte {error.start})') from error


def at(values: Any, path: str) -> Any:
    for name in path.split('.'):
        if not isinstance(values, dict) or name not in values:
            here = line(', '.join(values)) if isinstance(values, dict) else 'none'
            raise Fault(f'has no field "{path}" (fields: {here}; name one by #field=NAME behind the source)')
        values = values[name]
    return values


def string(values: Any, path: str) -> str:
    value = at(values, path)
    text = decoded(value) if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise Fault(f'has a "{path}" that is no text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Fault(f'has half a character in "{path}" (a lone surrogate)') from error
    return text


OPENERS = {'.gz': gunzipped, '.zst': unzstd}
TEXT, LINES, TABLE = Format('', whole, text), Format('line', lines, parsed), Format('row', rows, values)
FORMATS = {
    '.txt': TEXT,
    '.txt.gz': TEXT,
    '.txt.zst': TEXT,
    '.jsonl': LINES,
    '.jsonl.gz': LINES,
    '.jsonl.zst': LINES,
    '.parquet': TABLE,
}
