"""Records -> documents: where in a record the text and the domain are, and which words are to be predicted."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sinklab.data.documents.document import DamagedDocument, Document
from sinklab.data.documents.files import shorten_text
from sinklab.data.documents.formats import RecordError, decode_utf8
from sinklab.record import UserError

ROLES = ('system', 'user', 'assistant')


@dataclasses.dataclass(frozen=True)
class FieldNames:
    """Where in a record the content and the domain are; the domain may be nowhere, ''."""

    content: str
    domain: str

    @property
    def columns(self) -> list[str]:
        return sorted({name.partition('.')[0] for name in (self.content, self.domain) if name})


TextParts = tuple[tuple[str, bool], ...]
ContentReader = Callable[[dict[str, Any], str], TextParts]


def parse_field_options(source_name: str, argument: str, default_field: str) -> tuple[str, FieldNames]:
    """(what stands before #, the fields that are named behind it)"""
    head, _, tail = argument.rpartition('#')
    if not head or '=' not in tail:
        return argument, FieldNames(default_field, '')
    pairs = [pair.partition('=')[::2] for pair in tail.split(',')]
    for key, value in pairs:
        if key not in ('field', 'domain') or not value:
            raise UserError(f'{source_name} has the option {key}={value}; allowed behind #: field=NAME,domain=NAME')
    field_options = dict(pairs)
    return head, FieldNames(field_options.get('field', default_field), field_options.get('domain', ''))


def convert_records(records: Iterable, decode_record: Callable, fields: FieldNames, read_content: ContentReader) -> Iterator[Document | DamagedDocument]:
    """Of records with their names, places and sizes."""
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
    """<|user|>, newline, words, newline, <|assistant|>, newline, words that are predicted, newline, ..."""
    messages = get_field(values, path)
    if not isinstance(messages, list):
        raise RecordError(f'has a "{path}" that is no list of messages')
    segments = []
    for message in messages:
        role, words = get_string(message, 'role'), get_string(message, 'content')
        if role not in ROLES:
            raise RecordError(f'has a message of the role {role[:40]!r} (allowed: {", ".join(ROLES)})')
        segments += [('\n' if segments else '', False), (f'<|{role}|>\n', False), (words, role == 'assistant')]
    runs = itertools.groupby(filter(lambda part: part[0], segments), key=lambda part: part[1])
    parts = tuple((''.join(text for text, _ in run), predicted) for predicted, run in runs)
    if not any(predicted for _, predicted in parts):
        raise RecordError('has no words of an assistant')
    return parts


def get_field(values: Any, path: str) -> Any:
    for name in path.split('.'):
        if not isinstance(values, dict) or name not in values:
            available = shorten_text(', '.join(values)) if isinstance(values, dict) else 'none'
            raise RecordError(f'has no field "{path}" (fields: {available}; name one by #field=NAME behind the source)')
        values = values[name]
    return values


def get_string(values: Any, path: str) -> str:
    value = get_field(values, path)
    text = decode_utf8(value.decode) if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise RecordError(f'has a "{path}" that is no text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f'has half a character in "{path}" (a lone surrogate)') from error
    return text
