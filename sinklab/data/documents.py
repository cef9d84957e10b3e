"""Documents, data sources that yield them one at a time, and the conversion of records to documents."""

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from sinklab.errors import UserError, format_error, format_extra_command, shorten_text

ROLES = ('system', 'user', 'assistant')
TextParts = tuple[tuple[str, bool], ...]
ContentReader = Callable[[dict[str, Any], str], TextParts]


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a source.

    Attributes:
        name: Unique within the source, and independent of where the source is stored.
        parts: Pairs (text, whether the text is in the loss).
        domain: Domain name; '' if the source names none.
    """

    name: str
    parts: TextParts
    domain: str = ''

    @property
    def text(self) -> str:
        return ''.join(text for text, _ in self.parts)

    @property
    def is_blank(self) -> bool:
        return all(not text or text.isspace() for text, _ in self.parts)


@dataclasses.dataclass(frozen=True)
class SourcePiece:
    """A part of a source: a file, or a range of examples of a data set.

    Attributes:
        name: Unique within the source.
        size: Bytes on disk.
        read: Function that yields the documents one at a time, and raises UserError for one that cannot be read.
    """

    name: str
    size: int
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A data source: documents in pieces.

    Attributes:
        pieces: Pieces in a fixed order, which is the order of the documents.
        identity: JSON values that change whenever the content may have changed; part of the key of the store cache.
        weights: Pairs (domain, weight) of a weighted mixture; weights sum to 1. None otherwise.
        masked: Whether some parts of the documents are excluded from the loss.
        limit: Documents with a key below the limit are held out. None: `survey_corpus` computes the limit.
    """

    pieces: tuple[SourcePiece, ...]
    identity: tuple[Any, ...]
    weights: tuple[tuple[str, float], ...] | None = None
    masked: bool = False
    limit: int | None = None

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def read_documents(self) -> Iterator[Document]:
        for piece in self.pieces:
            yield from piece.read()


class RecordError(ValueError):
    """A record that cannot be used; `convert_records` adds where it is."""


@dataclasses.dataclass(frozen=True)
class FieldNames:
    """Paths of the fields that hold the content and the domain; '' if there is no domain field."""

    content: str
    domain: str


def parse_field_options(source_name: str, argument: str, default_field: str) -> tuple[str, FieldNames]:
    """Split a source argument such as 'GLOB#field=NAME,domain=NAME' into the part before `#` and the fields.

    Raises:
        UserError: An option is unknown or empty.
    """
    head, _, tail = argument.rpartition('#')
    if not head or '=' not in tail:
        return argument, FieldNames(default_field, '')
    options = dict(pair.partition('=')[::2] for pair in tail.split(','))
    for key, value in options.items():
        if key not in ('field', 'domain') or not value:
            raise UserError(f'{source_name} has the option {key}={value}; allowed after #: field=NAME,domain=NAME')
    return head, FieldNames(options.get('field', default_field), options.get('domain', ''))


def convert_records(
    records: Iterable[tuple[str, str, Any]],
    decode_record: Callable[[Any], dict[str, Any]],
    fields: FieldNames,
    read_content: ContentReader,
) -> Iterator[Document]:
    """Convert records (name, location, record) of a piece to documents; raise UserError for a damaged record."""
    for name, location, record in records:
        try:
            values = decode_record(record)
            parts = read_content(values, fields.content)
            document = Document(name, parts, get_string(values, fields.domain) if fields.domain else '')
        except RecordError as error:
            raise UserError(f'{location} {error}; repair it, or remove it') from error
        except UnicodeDecodeError as error:
            advice = 'convert it to UTF-8, such as with iconv -f latin1 -t utf-8'
            raise UserError(f'{location} is no text in UTF-8 ({format_error(error)}); {advice}') from error
        except (ValueError, RecursionError) as error:  # of JSON
            raise UserError(f'{location} is damaged ({format_error(error)}); repair it, or remove it') from error
        yield document


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
    segments: list[tuple[str, bool]] = []
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
    text = value.decode() if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise RecordError(f'has a "{path}" that is not text')
    text.encode()  # JSON may contain lone surrogates, for which this raises UnicodeEncodeError
    return text


def import_library(name: str, needed_by: object) -> ModuleType:
    """Import a library of the extra `data`; raise UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f'{needed_by} needs {name.partition(".")[0]}; install it: {format_extra_command("data")}'
        ) from error
