"""Formats: a file -> its records (a whole text, lines of JSON, rows of a table), one at a time."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents.files import content, library, line, reading
from sinklab.record import Refusal

ROWS = 256  # of a table, held at once


class Fault(ValueError):
    """Why one record cannot be used, others of its file being fine."""


@dataclasses.dataclass(frozen=True)
class Format:
    unit: str  # what a record is called; '' where it is the whole file
    records: Callable[[Path, list[str]], Iterator[tuple[int, Any, int]]]  # (number, record, bytes on disk)
    fields: Callable[[Any], dict[str, Any]]  # of a record, or a Fault


def format_of(path: Path) -> Format:
    return next(format for suffix, format in FORMATS.items() if str(path).endswith(suffix))


def whole(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    with content(path) as (text, file):
        yield 0, text.read(), file.tell()


def lines(path: Path, _: list[str]) -> Iterator[tuple[int, bytes, int]]:
    """Lines that are not blank; of a compressed file, the first line of a block stands for the block."""
    behind = 0
    with content(path) as (texts, file):
        for number, text in enumerate(texts, 1):
            if text.strip():
                behind, before = file.tell(), behind
                yield number, text, behind - before


def rows(path: Path, columns: list[str]) -> Iterator[tuple[int, Any, int]]:
    parquet, pyarrow = library('pyarrow.parquet', path), library('pyarrow', path)
    with reading(path, pyarrow.ArrowException), path.open('rb') as file:
        size = file.seek(0, os.SEEK_END)
        table = parquet.ParquetFile(file, buffer_size=1 << 20, page_checksum_verification=True)
        for name in columns:
            if name not in table.schema_arrow.names:
                raise Refusal(f'{path} has no column {name!r} (columns: {", ".join(table.schema_arrow.names)})')
        groups = range(table.num_row_groups)  # one by one: asked for all, it reads the whole file first
        batches = (batch for group in groups for batch in table.iter_batches(ROWS, [group], columns))
        count = table.metadata.num_rows
        for number, row in enumerate(itertools.chain.from_iterable(batch.to_struct_array() for batch in batches)):
            yield number + 1, row, size * (number + 1) // count - size * number // count


def utf8(decode: Callable[[], Any]) -> Any:
    """What decodes, or a Fault."""
    try:
        return decode()
    except UnicodeDecodeError as error:
        raise Fault(f'is not UTF-8 (byte {error.start})') from error


def json_object(content: bytes, hook: Callable | None = None) -> dict[str, Any]:
    try:
        fields = json.loads(utf8(content.decode).removeprefix('\ufeff'), object_pairs_hook=hook)
    except Fault:
        raise
    except (ValueError, RecursionError) as error:
        raise Fault(f'is not JSON ({line(error)})') from error
    if not isinstance(fields, dict):
        raise Fault('is not a JSON object')
    return fields


TEXT = Format('', whole, lambda content: {'text': utf8(content.decode)})
LINES = Format('line', lines, json_object)
FORMATS = {
    '.txt': TEXT,
    '.txt.gz': TEXT,
    '.txt.zst': TEXT,
    '.jsonl': LINES,
    '.jsonl.gz': LINES,
    '.jsonl.zst': LINES,
    '.parquet': Format('row', rows, lambda row: utf8(row.as_py)),
}
