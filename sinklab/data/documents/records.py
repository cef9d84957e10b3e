"""Records -> documents: where in a record the text and the domain are, and which words are to be predicted."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sinklab.data.documents.document import Damaged, Document
from sinklab.data.documents.files import line
from sinklab.data.documents.formats import Fault, utf8
from sinklab.record import Refusal

ROLES = ('system', 'user', 'assistant')


@dataclasses.dataclass(frozen=True)
class Fields:
    """Where in a record the content and the domain are; the domain may be nowhere, ''."""

    content: str
    domain: str

    @property
    def columns(self) -> list[str]:
        return sorted({name.partition('.')[0] for name in (self.content, self.domain) if name})


Parts = tuple[tuple[str, bool], ...]
Content = Callable[[dict[str, Any], str], Parts]


def options(given: str, rest: str, content: str) -> tuple[str, Fields]:
    """(what stands before #, the fields that are named behind it)"""
    head, _, tail = rest.rpartition('#')
    if not head or '=' not in tail:
        return rest, Fields(content, '')
    pairs = [pair.partition('=')[::2] for pair in tail.split(',')]
    for key, value in pairs:
        if key not in ('field', 'domain') or not value:
            raise Refusal(f'{given} has the option {key}={value}; allowed behind #: field=NAME,domain=NAME')
    named = dict(pairs)
    return head, Fields(named.get('field', content), named.get('domain', ''))


def documents(found: Iterable, values_of: Callable, fields: Fields, content: Content) -> Iterator[Document | Damaged]:
    """Of records with their names, places and sizes."""
    for name, where, record, size in found:
        try:
            values = values_of(record)
            domain = string(values, fields.domain) if fields.domain else ''
            yield Document(name, content(values, fields.content), domain, size)
        except Fault as fault:
            yield Damaged(where, str(fault), size)


def text(values: dict[str, Any], path: str) -> Parts:
    return ((string(values, path), True),)


def conversation(values: dict[str, Any], path: str) -> Parts:
    """<|user|>, newline, words, newline, <|assistant|>, newline, words that are predicted, newline, ..."""
    messages = field(values, path)
    if not isinstance(messages, list):
        raise Fault(f'has a "{path}" that is no list of messages')
    said = []
    for message in messages:
        role, words = string(message, 'role'), string(message, 'content')
        if role not in ROLES:
            raise Fault(f'has a message of the role {role[:40]!r} (allowed: {", ".join(ROLES)})')
        said += [('\n' if said else '', False), (f'<|{role}|>\n', False), (words, role == 'assistant')]
    runs = itertools.groupby(filter(lambda part: part[0], said), key=lambda part: part[1])
    parts = tuple((''.join(text for text, _ in run), predicted) for predicted, run in runs)
    if not any(predicted for _, predicted in parts):
        raise Fault('has no words of an assistant')
    return parts


def field(values: Any, path: str) -> Any:
    for name in path.split('.'):
        if not isinstance(values, dict) or name not in values:
            here = line(', '.join(values)) if isinstance(values, dict) else 'none'
            raise Fault(f'has no field "{path}" (fields: {here}; name one by #field=NAME behind the source)')
        values = values[name]
    return values


def string(values: Any, path: str) -> str:
    value = field(values, path)
    text = utf8(value.decode) if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise Fault(f'has a "{path}" that is no text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Fault(f'has half a character in "{path}" (a lone surrogate)') from error
    return text
