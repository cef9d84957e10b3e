"""Record formats (plain text, .jsonl, .parquet) and the conversion of records to documents."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents import DamagedDocument, Document
from sinklab.data.source_files import import_library, open_decompressed, translate_read_errors
from sinklab.errors import UserError, format_error, shorten_text

PARQUET_BATCH_ROWS = 256  # rows of a table in memory at once


class RecordError(ValueError):
    """One record that cannot be used; other records of the file are not affected."""


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """A file format: how to read its raw records and how to decode one of them."""

    unit: str  # word for one record, used in messages; '' if the record is the whole file
    # Function (path, columns) that yields (number, record, bytes on disk). Number is 0 for a whole file.
    read_records: Callable[[Path, list[str]], Iterator[tuple[int, Any, int]]]
    decode_record: Callable[[Any], dict[str, Any]]  # raises RecordError


def get_record_format(path: Path) -> RecordFormat:
    """Return the format of a file by its ending; a file with another ending, or with none, is plain text."""
    formats = (record_format for suffix, record_format in FORMATS.items() if str(path).endswith(suffix))
    return next(formats, TEXT_FORMAT)


def read_whole_file(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    with open_decompressed(path) as (text, file):
        yield 0, text.read(), file.tell()


def read_lines(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    """Yield (line number, line, bytes on disk) of the lines that are not blank.

    Bytes are differences of the file position. In a compressed file the first line of a block accounts for the whole
    block.
    """
    end = 0
    with open_decompressed(path) as (texts, file):
        for number, text in enumerate(texts, 1):
            if text.strip():
                end, start = file.tell(), end
                yield number, text, end - start


def read_parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[int, Any, int]]:
    parquet, pyarrow = import_library('pyarrow.parquet', path), import_library('pyarrow', path)
    with translate_read_errors(path, pyarrow.ArrowException), path.open('rb') as file:
        size = file.seek(0, os.SEEK_END)
        table = parquet.ParquetFile(file, buffer_size=1 << 20, page_checksum_verification=True)
        for name in columns:
            if name not in table.schema_arrow.names:
                raise UserError(f'{path} has no column {name!r} (columns: {", ".join(table.schema_arrow.names)})')
        groups = range(table.num_row_groups)  # one at a time: iter_batches over all groups reads the whole file first
        batches = (batch for group in groups for batch in table.iter_batches(PARQUET_BATCH_ROWS, [group], columns))
        count = table.metadata.num_rows
        for number, row in enumerate(itertools.chain.from_iterable(batch.to_struct_array() for batch in batches)):
            yield number + 1, row, size * (number + 1) // count - size * number // count


def decode_utf8(decode: Callable[[], Any]) -> Any:
    """Call a decoder and raise RecordError if it meets invalid UTF-8."""
    try:
        return decode()
    except UnicodeDecodeError as error:
        raise RecordError(f'is not UTF-8 (byte {error.start})') from error


def parse_json_object(encoded: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(decode_utf8(encoded.decode).removeprefix('\ufeff'))
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f'is not JSON ({format_error(error)})') from error
    if not isinstance(fields, dict):
        raise RecordError('is not a JSON object')
    return fields


TEXT_FORMAT = RecordFormat('', read_whole_file, lambda content: {'text': decode_utf8(content.decode)})
JSONL_FORMAT = RecordFormat('line', read_lines, parse_json_object)
FORMATS = {
    **dict.fromkeys(('.txt', '.txt.gz', '.txt.zst'), TEXT_FORMAT),
    **dict.fromkeys(('.jsonl', '.jsonl.gz', '.jsonl.zst'), JSONL_FORMAT),
    '.parquet': RecordFormat('row', read_parquet_rows, lambda row: decode_utf8(row.as_py)),
}


ROLES = ('system', 'user', 'assistant')


@dataclasses.dataclass(frozen=True)
class FieldNames:
    """Paths of the fields that hold the content and the domain; '' if there is no domain field."""

    content: str
    domain: str

    @property
    def columns(self) -> list[str]:
        return sorted({name.partition('.')[0] for name in (self.content, self.domain) if name})


TextParts = tuple[tuple[str, bool], ...]
ContentReader = Callable[[dict[str, Any], str], TextParts]


def parse_field_options(source_name: str, argument: str, default_field: str) -> tuple[str, FieldNames]:
    """Split a source argument into the part before `#` and the fields named after it.

    Args:
        source_name: The whole source, for messages.
        argument: Such as 'GLOB#field=NAME,domain=NAME'.
        default_field: The content field if none is named.

    Raises:
        UserError: An option is unknown or empty.
    """
    head, _, tail = argument.rpartition('#')
    if not head or '=' not in tail:
        return argument, FieldNames(default_field, '')
    pairs = [pair.partition('=')[::2] for pair in tail.split(',')]
    for key, value in pairs:
        if key not in ('field', 'domain') or not value:
            raise UserError(f'{source_name} has the option {key}={value}; allowed after #: field=NAME,domain=NAME')
    field_options = dict(pairs)
    return head, FieldNames(field_options.get('field', default_field), field_options.get('domain', ''))


def convert_records(
    records: Iterable, decode_record: Callable, fields: FieldNames, read_content: ContentReader
) -> Iterator[Document | DamagedDocument]:
    """Convert records (name, location, record, size) to documents, or to damaged documents."""
    for name, location, record, size in records:
        try:
            values = decode_record(record)
            domain = get_string(values, fields.domain) if fields.domain else ''
            yield Document(name, read_content(values, fields.content), domain, size)
        except RecordError as fault:
            yield DamagedDocument(location, str(fault), size)


def read_text(values: dict[str, Any], path: str) -> TextParts:
    return ((get_string(values, path), True),)


def read_conversation(values: dict[str, Any], path: str) -> TextParts:
    r"""Format a conversation as text parts: `<|user|>\nWORDS\n<|assistant|>\nWORDS\n...`.

    Only the words of the assistant are in the loss. Neighbouring parts with the same loss mask are joined.

    Raises:
        RecordError: The field is no list of messages, a role is unknown, or the assistant has no words.
    """
    messages = get_field(values, path)
    if not isinstance(messages, list):
        raise RecordError(f'has a "{path}" that is not a list of messages')
    segments = []
    for message in messages:
        role, words = get_string(message, 'role'), get_string(message, 'content')
        if role not in ROLES:
            raise RecordError(f'has a message with the role {role[:40]!r} (allowed: {", ".join(ROLES)})')
        segments += [('\n' if segments else '', False), (f'<|{role}|>\n', False), (words, role == 'assistant')]
    runs = itertools.groupby(filter(lambda part: part[0], segments), key=lambda part: part[1])
    parts = tuple((''.join(text for text, _ in run), predicted) for predicted, run in runs)
    if not any(predicted for _, predicted in parts):
        raise RecordError('has no message of an assistant')
    return parts


def get_field(values: Any, path: str) -> Any:
    for name in path.split('.'):
        if not isinstance(values, dict) or name not in values:
            available = shorten_text(', '.join(values)) if isinstance(values, dict) else 'none'
            raise RecordError(
                f'has no field "{path}" (fields: {available}; name one with #field=NAME after the source)'
            )
        values = values[name]
    return values


def get_string(values: Any, path: str) -> str:
    value = get_field(values, path)
    text = decode_utf8(value.decode) if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise RecordError(f'has a "{path}" that is not text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f'has an incomplete character in "{path}" (a lone surrogate)') from error
    return text
