"""Data sources: what `--source` and `config.data.source` may name, in the table `SOURCES`."""

import dataclasses
import functools
import itertools
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents import buckets, catalog, files, formats, records
from sinklab.data.documents.document import DamagedDocument, Document, SourcePiece, Source, require_intact
from sinklab.data.documents.mixture import open_mixture
from sinklab.data.documents.records import ContentReader, FieldNames
from sinklab.files.place import is_remote, parse_path
from sinklab.record import UserError, format_unknown_name

SKIPPED_NAMES = {'site-packages', 'test', 'tests', 'idle_test'}
MAX_TFDS_PIECES = 64  # of a data set of the catalogue


def open_source(source_name: str) -> Source:
    """Return the data source of a name, such as `text:corpus/*.txt`; nothing is read before its documents are.

    Args:
        given: The name: the kind, a colon, and what the kind needs, as `SOURCES` lists them. To add a kind is to
            write a function (name, what follows the colon) -> Source and to enter it there.

    Raises:
        Refusal: There is no such kind, or no such file.
    """
    openers = {form.partition(':')[0]: kind for form, kind in SOURCES.items()}
    kind, _, argument = source_name.partition(':')
    if kind not in openers:
        hint = f'; for the file, give text:{source_name}' if os.path.exists(source_name) else ''
        raise UserError(format_unknown_name(source_name, kind, SOURCES, 'sources') + hint)
    return openers[kind](source_name, argument)


def read_texts(source_name: str) -> list[str]:
    """Read the texts of a small corpus into memory, without those that are blank."""
    documents = map(require_intact, open_source(source_name).read_documents())
    return [document.text for document in documents if not document.is_blank]


def open_stdlib(source_name: str, argument: str) -> Source:
    """The Python sources of the running interpreter's standard library, its tests aside."""
    if argument:
        raise UserError(f'{source_name} is more than stdlib, which is the whole library; leave :{argument} out')
    root = Path(sysconfig.get_path('stdlib'))
    names = sorted(path.relative_to(root).as_posix() for path in find_python_files(root))
    return make_file_source('stdlib', [(name, root / name) for name in names], read_python_file)


def find_python_files(root: Path) -> Iterator[Path]:
    """The .py files below a folder; installed packages, ten times as many, are never entered."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_NAMES
        yield from (Path(folder, name) for name in set(names) - SKIPPED_NAMES if name.endswith('.py'))


def read_python_file(name: str, path: Path) -> Iterator[Document | DamagedDocument]:
    size = path.stat().st_size
    try:
        with files.translate_read_errors(path), tokenize.open(path) as file:  # honours a coding cookie
            yield Document(name, ((file.read(), True),), '', size)
    except (UnicodeDecodeError, SyntaxError) as error:
        yield DamagedDocument(str(path), f'is not Python ({files.shorten_text(error)})', size)


def open_text(source_name: str, argument: str) -> Source:
    """Each .txt is a document, and so is a field of each line of a .jsonl and of each row of a .parquet."""
    pattern, fields = records.parse_field_options(source_name, argument, 'text')
    matched_files = match_files(source_name, pattern, formats.FORMATS)
    for _, path in matched_files:
        if formats.get_record_format(path) is formats.TEXT_FORMAT and fields != FieldNames('text', ''):
            raise UserError(f'{source_name} names fields, and {path} has none; leave them out, or match other files')
    return make_record_source('text', matched_files, fields, records.read_text)


def open_chat(source_name: str, argument: str) -> Source:
    """Each line or row is a conversation, of which the words of the assistant are to be predicted."""
    pattern, fields = records.parse_field_options(source_name, argument, 'messages')
    suffixes = [suffix for suffix, record_format in formats.FORMATS.items() if record_format is not formats.TEXT_FORMAT]
    return make_record_source('chat', match_files(source_name, pattern, suffixes), fields, records.read_conversation, masked=True)


def open_tfds(source_name: str, argument: str) -> Source:
    """Each example of a split of a data set of the catalogue of TensorFlow Datasets is a document."""
    name, fields = records.parse_field_options(source_name, argument, '')
    split = catalog.open_split(source_name, name)
    fields = FieldNames(fields.content or split.find_text_feature(), fields.domain)
    split.check_features(fields.content, fields.domain)
    count = min(MAX_TFDS_PIECES, len(split))
    bounds = [len(split) * number // count for number in range(count + 1)]

    def make_piece(start: int, stop: int) -> SourcePiece:
        def read() -> Iterator[Document | DamagedDocument]:
            return records.convert_records(split.read_records(start, stop), dict, fields, records.read_text)

        return SourcePiece(f'{name}:{start}-{stop}', split.estimate_bytes(stop) - split.estimate_bytes(start), read)

    pieces = tuple(itertools.starmap(make_piece, itertools.pairwise(bounds)))
    return Source(pieces, ('tfds', *dataclasses.astuple(fields), *split.identity))


def match_files(source_name: str, pattern: str, suffixes: Iterable[str]) -> list[tuple[str, Path]]:
    matched_files: list[tuple[str, Path]] = (
        buckets.glob_objects(pattern) if is_remote(pattern) else files.glob_files(pattern)
    )
    if not matched_files:
        if parse_path(pattern).is_dir() if is_remote(pattern) else os.path.isdir(pattern):
            raise UserError(f'{source_name} is a folder; name its files, as in {pattern}/*.txt, and quote the pattern')
        raise UserError(f'{source_name} matches no file; quote the pattern, check the path')
    for _, path in matched_files:
        if not str(path).endswith(tuple(suffixes)):
            raise UserError(f'{source_name} matches {path}, which cannot be read; allowed: {", ".join(suffixes)}')
    return matched_files


def make_file_source(
    kind: str,
    matched_files: list[tuple[str, Path]],
    read: Callable[[str, Path], Iterator[Document | DamagedDocument]],
    *identity_parts: str,
    masked: bool = False,
) -> Source:
    pieces: list[SourcePiece] = []
    identity: list[Any] = [kind, *identity_parts]
    for name, path in matched_files:
        size, version = get_file_version(path)
        identity.append((name, size, version))
        pieces.append(SourcePiece(name, size, functools.partial(read, name, path)))
    return Source(tuple(pieces), tuple(identity), masked=masked)


def get_file_version(path: Path | buckets.RemoteFile) -> tuple[int, int | str]:
    """(bytes, what changes with them) of a file."""
    if isinstance(path, buckets.RemoteFile):
        return path.size, path.version
    with files.translate_read_errors(path):
        status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def make_record_source(
    kind: str, matched_files: list[tuple[str, Path]], fields: FieldNames, read_content: ContentReader, masked: bool = False
) -> Source:
    def read(name: str, path: Path) -> Iterator[Document | DamagedDocument]:
        record_format = formats.get_record_format(path)
        numbered_records = (
            (f'{name}:{number}', f'{path}, {record_format.unit} {number}', record, size)
            if number
            else (name, str(path), record, size)
            for number, record, size in record_format.read_records(path, fields.columns)
        )
        return records.convert_records(numbered_records, record_format.decode_record, fields, read_content)

    return make_file_source(kind, matched_files, read, fields.content, fields.domain, masked=masked)


SOURCES: dict[str, Callable[[str, str], Source]] = {
    'stdlib': open_stdlib,
    'text:GLOB': open_text,
    'chat:GLOB': open_chat,
    'tfds:NAME[:SPLIT]': open_tfds,
    'mixture:FILE': functools.partial(open_mixture, open_part=open_source),
}
