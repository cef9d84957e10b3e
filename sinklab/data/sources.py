"""Data sources that `--source` and `config.data.source` can name; the table `SOURCES` lists them."""

import ast
import contextlib
import dataclasses
import functools
import glob
import gzip
import io
import itertools
import json
import math
import os
import re
import sysconfig
import textwrap
import tokenize
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec

from sinklab.data.documents import (
    ContentReader,
    Document,
    FieldNames,
    Source,
    SourcePiece,
    convert_records,
    import_library,
    parse_field_options,
    read_conversation,
    read_text,
)
from sinklab.data.tfds import open_tfds
from sinklab.errors import UserError, format_error, format_unknown_name
from sinklab.storage.files import read_json
from sinklab.storage.paths import get_file_system, is_remote, make_relative, parse_path

WILDCARD = re.compile(r'[*?[]')
PARQUET_BATCH_ROWS = 256  # rows of a table in memory at once
SKIPPED_NAMES = {'site-packages', 'test', 'tests', 'idle_test'}
MIXTURE_FORM = '{"domain": {"source": "text:GLOB", "weight": 0.3}, ...}'


class SourceFile(NamedTuple):
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
    """Return the files that match a pattern with *, **, ? and [abc], sorted by name.

    Raises:
        UserError: A file or the bucket cannot be read.
    """
    infos = find_objects(pattern) if is_remote(pattern) else find_local_files(pattern)
    root = parse_path(os.path.dirname(WILDCARD.split(pattern)[0]))
    names = {path: os.fsencode(make_relative(parse_path(path), root)) for path in infos}
    files = [
        SourceFile(names[path].decode(errors='backslashreplace'), parse_path(path), *info)
        for path, info in infos.items()
    ]
    return sorted(files)


def find_local_files(pattern: str) -> dict[str, tuple[int, int]]:
    """Return (size, time of the last change) by path of the files that match a pattern."""
    infos = {}
    for path in glob.glob(pattern, recursive=True):
        if not os.path.isdir(path):
            with translate_read_errors(path):
                status = os.stat(path)
            infos[path] = status.st_size, status.st_mtime_ns
    return infos


def find_objects(pattern: str) -> dict[str, tuple[int, str]]:
    """Return (size, digest) by URL of the objects that match a pattern, as on a disk."""
    with translate_read_errors(pattern):
        infos = get_file_system().glob(pattern, detail=True)
    return {
        f'gs://{name}': (info['size'], info.get('md5Hash') or info['crc32c'])
        for name, info in infos.items()
        if info['type'] == 'file' and ('/.' not in name or '/.' in pattern)  # * matches no leading dot
    }


@contextlib.contextmanager
def translate_read_errors(
    path: object, damage_errors: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error)
) -> Iterator[None]:
    """Turn errors of reading a file into a UserError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f'{path} cannot be read: there is no such file') from error
    except damage_errors as error:
        if reason := getattr(error, 'strerror', None):
            raise UserError(f'{path} cannot be read: {reason}') from error
        raise UserError(f'{path} is truncated or damaged ({format_error(error)}); get it again') from error


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    with translate_read_errors(path), path.open('rb') as file:
        if path.suffix == '.gz':
            yield io.BufferedReader(gzip.GzipFile(fileobj=file))
        elif path.suffix == '.zst':
            stream = import_library('pyarrow', path).CompressedInputStream(file, 'zstd')
            yield io.BufferedReader(stream, 1 << 17)
        else:
            yield file


class FileFormat(NamedTuple):
    """A file format: how to read its raw records and how to decode one of them."""

    unit: str  # word for one record, used in messages; '' if the record is the whole file
    read_records: Callable[[Path, FieldNames], Iterator[tuple[int, Any]]]  # yields (number from 1, raw record)
    decode_record: Callable[[Any], dict[str, Any]]  # raises ValueError


def read_whole_file(path: Path, _: FieldNames) -> Iterator[tuple[int, bytes]]:
    with open_decompressed(path) as file:
        yield 1, file.read()


def read_lines(path: Path, _: FieldNames) -> Iterator[tuple[int, bytes]]:
    with open_decompressed(path) as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def read_parquet_rows(path: Path, fields: FieldNames) -> Iterator[tuple[int, Any]]:
    parquet, pyarrow = import_library('pyarrow.parquet', path), import_library('pyarrow', path)
    columns = sorted({name.partition('.')[0] for name in (fields.content, fields.domain) if name})
    with translate_read_errors(path, (OSError, pyarrow.ArrowException)), path.open('rb') as file:
        table = parquet.ParquetFile(file, buffer_size=1 << 20, page_checksum_verification=True)
        for name in columns:
            if name not in table.schema_arrow.names:
                raise UserError(f'{path} has no column {name!r} (columns: {", ".join(table.schema_arrow.names)})')
        groups = range(table.num_row_groups)  # one at a time: iter_batches over all groups reads the whole file first
        batches = (batch for group in groups for batch in table.iter_batches(PARQUET_BATCH_ROWS, [group], columns))
        yield from enumerate(itertools.chain.from_iterable(batch.to_struct_array() for batch in batches), 1)


TEXT_FORMAT = FileFormat('', read_whole_file, lambda content: {'text': content.decode()})
JSONL_FORMAT = FileFormat('line', read_lines, json.loads)
PARQUET_FORMAT = FileFormat('row', read_parquet_rows, lambda row: row.as_py())


def choose_format(path: Path) -> FileFormat:
    """Return the format of a file by its ending; a file with any other ending is plain text."""
    name = str(path).removesuffix('.gz').removesuffix('.zst')
    return {'.jsonl': JSONL_FORMAT, '.parquet': PARQUET_FORMAT}.get(os.path.splitext(name)[1], TEXT_FORMAT)


def open_source(source_name: str) -> Source:
    """Return the data source of a name, such as `text:corpus/*.txt`, without reading its documents.

    Args:
        source_name: The kind, a colon, and what the kind needs, as `SOURCES` lists them. To add a kind, write a
            function (name, what follows the colon) -> Source and add it there.

    Raises:
        UserError: The kind is unknown, the name is not UTF-8, or no file matches.
    """
    if any('\ud800' <= character <= '\udfff' for character in source_name):
        raise UserError(f'{source_name!r} is not UTF-8; rename the file or folder, or give a pattern that matches it')
    openers = {form.partition(':')[0]: opener for form, opener in SOURCES.items()}
    kind, _, argument = source_name.partition(':')
    if kind not in openers:
        hint = f'; for this file, give text:{source_name}' if os.path.exists(source_name) else ''
        raise UserError(format_unknown_name(source_name, kind, SOURCES, 'sources') + hint)
    return openers[kind](source_name, argument)


def read_texts(source_name: str) -> list[str]:
    """Read the texts of a small corpus into memory, without blank ones.

    Raises:
        UserError: The source cannot be opened, or a document is damaged.
    """
    return [document.text for document in open_source(source_name).read_documents() if not document.is_blank]


def open_stdlib(source_name: str, argument: str) -> Source:
    """Open the Python standard library of the running interpreter as a source, without its tests.

    A document is a file; with the argument `functions`, the part of a file from one function or class to the next.
    """
    readers = {'': read_python_file, 'functions': read_functions}
    if argument not in readers:
        raise UserError(f'{source_name}: stdlib has no part {argument!r}; give stdlib or stdlib:functions')
    root = Path(sysconfig.get_path('stdlib'))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_NAMES  # site-packages has ten times as many files
        for path in (Path(folder, name) for name in set(names) - SKIPPED_NAMES if name.endswith('.py')):
            status = path.stat()
            files.append(SourceFile(path.relative_to(root).as_posix(), path, status.st_size, status.st_mtime_ns))
    return make_file_source(source_name, sorted(files), readers[argument])


def read_python_file(file: SourceFile) -> Iterator[Document]:
    with translate_read_errors(file.path), tokenize.open(file.path) as python:  # honours a coding cookie
        yield Document(file.name, ((python.read(), True),))


def read_functions(file: SourceFile) -> Iterator[Document]:
    """Split a file before each function, method and class; indentation that all lines share is removed."""
    (document,) = read_python_file(file)
    definitions = [
        node
        for node in ast.walk(ast.parse(document.text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    starts = {min(part.lineno for part in (node, *node.decorator_list)) - 1 for node in definitions}
    lines = io.StringIO(document.text).readlines()  # str.splitlines also splits at form feeds
    for start, end in itertools.pairwise(sorted({0, *starts, len(lines)})):
        yield Document(f'{file.name}:{start + 1}', ((textwrap.dedent(''.join(lines[start:end])), True),))


def open_text_source(source_name: str, argument: str) -> Source:
    """Open text files: one document per .jsonl line, .parquet row, or file of plain text."""
    pattern, fields = parse_field_options(source_name, argument, 'text')
    return open_record_source(source_name, pattern, fields, read_text)


def open_chat(source_name: str, argument: str) -> Source:
    """Open conversations, one per .jsonl line or .parquet row; only the words of the assistant are in the loss."""
    pattern, fields = parse_field_options(source_name, argument, 'messages')
    return dataclasses.replace(open_record_source(source_name, pattern, fields, read_conversation), masked=True)


def open_record_source(source_name: str, pattern: str, fields: FieldNames, read_content: ContentReader) -> Source:
    """Open the files that match a pattern.

    Raises:
        UserError: No file matches, or fields other than `text` are needed and a file is plain text.
    """
    files = match_files(pattern)
    if not files:
        remedy = 'check the path, quote the pattern, and give the files of a folder as FOLDER/*.txt'
        raise UserError(f'{source_name} matches no file; {remedy}')
    text_files = [file.path for file in files if choose_format(file.path) == TEXT_FORMAT]
    if text_files and fields != FieldNames('text', ''):
        raise UserError(f'{source_name} needs records, but {text_files[0]} is plain text; match .jsonl or .parquet')

    def read(file: SourceFile) -> Iterator[Document]:
        unit, read_records, decode_record = choose_format(file.path)
        records = (
            (f'{file.name}:{number}', f'{file.path}, {unit} {number}', record)
            if unit
            else (file.name, str(file.path), record)
            for number, record in read_records(file.path, fields)
        )
        return convert_records(records, decode_record, fields, read_content)

    return make_file_source(source_name.partition(':')[0], files, read, fields.content, fields.domain)


FileReader = Callable[[SourceFile], Iterator[Document]]


def make_file_source(kind: str, files: list[SourceFile], read: FileReader, *options: str) -> Source:
    pieces = tuple(SourcePiece(file.name, file.size, functools.partial(read, file)) for file in files)
    identity = (kind, *options, *((file.name, file.size, file.version) for file in files))
    return Source(pieces, identity)


class Component(msgspec.Struct, forbid_unknown_fields=True):
    """A component of the JSON file of a mixture."""

    source: str
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None


def open_mixture(source_name: str, argument: str) -> Source:
    """Open a mixture: a JSON file of sources, each of which is one domain.

    Raises:
        UserError: The file or a component is invalid, or only some components have a weight or a loss mask.
    """
    with translate_read_errors(argument):
        components = read_json(parse_path(argument), dict[str, Component], remedy=f'write {MIXTURE_FORM}')
    if not components:
        raise UserError(f'{source_name} has no component; write {MIXTURE_FORM}')
    if any(component['source'].startswith('mixture:') for component in components.values()):
        raise UserError(f'{source_name} contains a mixture; give its components here')
    sources = {name: open_source(component['source']) for name, component in components.items()}
    weights = {name: value['weight'] for name, value in components.items() if value.get('weight') is not None}
    if unweighted := weights and [name for name in components if name not in weights]:
        raise UserError(f'{source_name} has no weight for {", ".join(unweighted)}; give a weight to all, or to none')
    if len({part.masked for part in sources.values()}) > 1:
        raise UserError(f'{source_name} mixes chat: with sources that have no roles; make separate mixtures')
    total = math.fsum(weights.values())
    return Source(
        pieces=tuple(set_domain(piece, name) for name, part in sources.items() for piece in part.pieces),
        identity=('mixture', *((name, weights.get(name), part.identity) for name, part in sources.items())),
        weights=tuple((name, weight / total) for name, weight in weights.items()) or None,
        masked=all(part.masked for part in sources.values()),
    )


def set_domain(piece: SourcePiece, name: str) -> SourcePiece:
    def read() -> Iterator[Document]:
        for document in piece.read():
            yield dataclasses.replace(document, name=f'{name}/{document.name}', domain=name)

    return dataclasses.replace(piece, name=f'{name}/{piece.name}', read=read)


SOURCES: dict[str, Callable[[str, str], Source]] = {
    'stdlib': open_stdlib,
    'text:GLOB': open_text_source,
    'chat:GLOB': open_chat,
    'tfds:NAME[:SPLIT]': open_tfds,
    'mixture:FILE': open_mixture,
}
