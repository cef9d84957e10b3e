"""Data sources that `--source` and `config.data.source` can name; the table `SOURCES` lists them."""

import dataclasses
import functools
import math
import os
import sysconfig
import tokenize
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from sinklab.data import source_formats
from sinklab.data.documents import DamagedDocument, Document, Source, SourcePiece, require_intact
from sinklab.data.source_files import SourceFile, is_text_file, match_files, translate_read_errors
from sinklab.data.source_formats import FORMATS, TEXT_FORMAT, ContentReader, FieldNames, get_record_format
from sinklab.data.tfds import open_tfds
from sinklab.errors import UserError, format_error, format_unknown_name
from sinklab.storage.files import read_json
from sinklab.storage.paths import parse_path

SKIPPED_NAMES = {'site-packages', 'test', 'tests', 'idle_test'}
MIXTURE_FORM = '{"domain": {"source": "text:GLOB", "weight": 0.3}, ...}'
Reader = Callable[[SourceFile], Iterator[Document | DamagedDocument]]


class Component(msgspec.Struct, forbid_unknown_fields=True):
    """A component of the JSON file of a mixture."""

    source: str
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e100)] | None = None  # the limit keeps the sum finite


def open_source(source_name: str) -> Source:
    """Return the data source of a name, such as `text:corpus/*.txt`, without reading its documents.

    Args:
        source_name: The kind, a colon, and what the kind needs, as `SOURCES` lists them. To add a kind, write a
            function (name, what follows the colon) -> Source and add it there.

    Raises:
        UserError: The kind is unknown, or no file matches.
    """
    openers = {form.partition(':')[0]: kind for form, kind in SOURCES.items()}
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
    documents = map(require_intact, open_source(source_name).read_documents())
    return [document.text for document in documents if not document.is_blank]


def open_stdlib(source_name: str, argument: str) -> Source:
    """Open the Python standard library of the running interpreter as a source, without its tests."""
    if argument:
        raise UserError(f'{source_name} has an argument, but stdlib is the whole library; remove :{argument}')
    root = Path(sysconfig.get_path('stdlib'))
    files = []
    for path in find_python_files(root):
        status = path.stat()
        name = path.relative_to(root).as_posix()
        files.append(SourceFile(name, path, status.st_size, status.st_mtime_ns))
    return make_file_source('stdlib', sorted(files, key=lambda file: file.name), read_python_file)


def find_python_files(root: Path) -> Iterator[Path]:
    """Find the .py files below a folder without entering site-packages, which holds ten times as many."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_NAMES
        yield from (Path(folder, name) for name in set(names) - SKIPPED_NAMES if name.endswith('.py'))


def read_python_file(file: SourceFile) -> Iterator[Document | DamagedDocument]:
    try:
        with translate_read_errors(file.path), tokenize.open(file.path) as text:  # honours a coding cookie
            yield Document(file.name, ((text.read(), True),), '', file.size)
    except (UnicodeDecodeError, SyntaxError) as error:
        yield DamagedDocument(str(file.path), f'is not Python ({format_error(error)})', file.size)


def open_text_source(source_name: str, argument: str) -> Source:
    """Open text files: one document per .jsonl line, .parquet row, or file of plain text."""
    pattern, fields = source_formats.parse_field_options(source_name, argument, 'text')
    files = match_readable_files(source_name, pattern, FORMATS, accepts_text=True)
    for file in files:
        if get_record_format(file.path) is TEXT_FORMAT and fields != FieldNames('text', ''):
            raise UserError(
                f'{source_name} names fields, but {file.path} has none; remove them, or match other files'
            )
    return make_record_source('text', files, fields, source_formats.read_text)


def open_chat(source_name: str, argument: str) -> Source:
    """Open conversations, one per .jsonl line or .parquet row.

    Only the words of the assistant are in the loss.
    """
    pattern, fields = source_formats.parse_field_options(source_name, argument, 'messages')
    suffixes = [suffix for suffix, record_format in FORMATS.items() if record_format is not TEXT_FORMAT]
    files = match_readable_files(source_name, pattern, suffixes, accepts_text=False)
    return make_record_source('chat', files, fields, source_formats.read_conversation, masked=True)


def match_readable_files(
    source_name: str, pattern: str, suffixes: Collection[str], accepts_text: bool
) -> list[SourceFile]:
    """Return the files that match a pattern.

    Raises:
        UserError: No file matches, or a file has none of the suffixes and is no text, or `accepts_text` is False.
    """
    files = match_files(pattern)
    if not files:
        remedy = 'check the path, quote the pattern, and give the files of a folder as FOLDER/*.txt'
        raise UserError(f'{source_name} matches no file; {remedy}')
    for file in files:
        if not str(file.path).endswith(tuple(suffixes)) and not (accepts_text and is_text_file(file.path)):
            allowed = f'{", ".join(suffixes)}{", and other files of UTF-8 text" if accepts_text else ""}'
            raise UserError(f'{source_name} matches {file.path}, which cannot be read; allowed: {allowed}')
    return files


def make_record_source(
    kind: str, files: list[SourceFile], fields: FieldNames, read_content: ContentReader, masked: bool = False
) -> Source:
    def read(file: SourceFile) -> Iterator[Document | DamagedDocument]:
        record_format = get_record_format(file.path)
        records = (
            (f'{file.name}:{number}', f'{file.path}, {record_format.unit} {number}', record, size)
            if number
            else (file.name, str(file.path), record, size)
            for number, record, size in record_format.read_records(file.path, fields.columns)
        )
        return source_formats.convert_records(records, record_format.decode_record, fields, read_content)

    return make_file_source(kind, files, read, fields.content, fields.domain, masked=masked)


def make_file_source(kind: str, files: list[SourceFile], read: Reader, *options: str, masked: bool = False) -> Source:
    pieces = tuple(SourcePiece(file.name, file.size, functools.partial(read, file)) for file in files)
    identity = (kind, *options, *((file.name, file.size, file.version) for file in files))
    return Source(pieces, identity, masked=masked)


def open_mixture(source_name: str, argument: str) -> Source:
    """Open a mixture: a JSON file of sources, each of which is one domain.

    Raises:
        UserError: The file or a component is invalid, or only some components have a weight or a loss mask.
    """
    with translate_read_errors(argument):
        components = read_json(parse_path(argument), dict[str, Component], remedy=f'write {MIXTURE_FORM}')
    if not components:
        raise UserError(f'{source_name} has no component; write {MIXTURE_FORM}')
    sources = {name: open_component(source_name, name, value['source']) for name, value in components.items()}
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


def open_component(source_name: str, name: str, component: str) -> Source:
    label = f'{source_name}, {name[:80]!a},'
    if not name.isprintable() or not name or '/' in name:
        raise UserError(f'{label} is not a name of a domain; use printable text without /')
    if 'domain=' in component.rpartition('#')[2]:
        raise UserError(f'{label} sets another domain after #, but its documents have this one; remove domain=')
    if component.startswith('mixture:'):
        raise UserError(f'{label} is a mixture itself; give its components here')
    try:
        return open_source(component)
    except UserError as error:
        raise UserError(f'{label} {error}') from error


def set_domain(piece: SourcePiece, name: str) -> SourcePiece:
    def read() -> Iterator[Document | DamagedDocument]:
        for document in piece.read():
            if isinstance(document, Document):
                document = dataclasses.replace(document, name=f'{name}/{document.name}', domain=name)
            yield document

    return dataclasses.replace(piece, name=f'{name}/{piece.name}', read=read)


SOURCES: dict[str, Callable[[str, str], Source]] = {
    'stdlib': open_stdlib,
    'text:GLOB': open_text_source,
    'chat:GLOB': open_chat,
    'tfds:NAME[:SPLIT]': open_tfds,
    'mixture:FILE': open_mixture,
}
