"""Formats: a file -> its records (a whole text, lines of JSON, rows of a table), one at a time."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents.files import open_decompressed, import_library, shorten_text, translate_read_errors
from sinklab.record import UserError

PARQUET_BATCH_ROWS = 256  # of a table, held at once


class RecordError(ValueError):
    """Why one record cannot be used, others of its file being fine."""


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    unit: str  # what a record is called; '' where it is the whole file
    read_records: Callable[[Path, list[str]], Iterator[tuple[int, Any, int]]]  # (number, record, bytes on disk)
    decode_record: Callable[[Any], dict[str, Any]]  # of a record, or a Fault


def get_record_format(path: Path) -> RecordFormat:
    return next(record_format for suffix, record_format in FORMATS.items() if str(path).endswith(suffix))


def read_whole_file(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    with open_decompressed(path) as (text, file):
        yield 0, text.read(), file.tell()


def read_lines(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    """Lines that are not blank; of a compressed file, the first line of a block stands for the block."""
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
        groups = range(table.num_row_groups)  # one by one: asked for all, it reads the whole file first
        batches = (batch for group in groups for batch in table.iter_batches(PARQUET_BATCH_ROWS, [group], columns))
        count = table.metadata.num_rows
        for number, row in enumerate(itertools.chain.from_iterable(batch.to_struct_array() for batch in batches)):
            yield number + 1, row, size * (number + 1) // count - size * number // count


def decode_utf8(decode: Callable[[], Any]) -> Any:
    """What decodes, or a Fault."""
    try:
        return decode()
    except UnicodeDecodeError as error:
        raise RecordError(f'is not UTF-8 (byte {error.start})') from error


def parse_json_object(encoded: bytes, hook: Callable | None = None) -> dict[str, Any]:
    try:
        fields = json.loads(decode_utf8(encoded.decode).removeprefix('\ufeff'), object_pairs_hook=hook)
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f'is not JSON ({shorten_text(error)})') from error
    if not isinstance(fields, dict):
        raise RecordError('is not a JSON object')
    return fields


TEXT_FORMAT = RecordFormat('', read_whole_file, lambda content: {'text': decode_utf8(content.decode)})
JSONL_FORMAT = RecordFormat('line', read_lines, parse_json_object)
FORMATS = {
    '.txt': TEXT_FORMAT,
    '.txt.gz': TEXT_FORMAT,
    '.txt.zst': TEXT_FORMAT,
    '.jsonl': JSONL_FORMAT,
    '.jsonl.gz': JSONL_FORMAT,
    '.jsonl.zst': JSONL_FORMAT,
    '.parquet': RecordFormat('row', read_parquet_rows, lambda row: decode_utf8(row.as_py)),
}
