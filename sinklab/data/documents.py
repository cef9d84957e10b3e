"""Documents: named texts from a source, and which of them are held out."""

import dataclasses
import glob
import hashlib
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from sinklab.record import Refusal, unknown

LEFT_OUT = {'site-packages', 'test', 'tests', 'idle_test'}


@dataclasses.dataclass(frozen=True)
class Document:
    name: str
    text: str


def read(source: str) -> list[Document]:
    """The documents of `stdlib` or `text:GLOB`, sorted by name, those without a letter left out."""
    kind, _, rest = source.partition(':')
    if kind not in SOURCES:
        raise Refusal(unknown(f'config.data.source = {source!r}', kind, ('stdlib', 'text:GLOB'), 'sources'))
    documents = [document for document in SOURCES[kind](rest) if document.text.strip()]
    if not documents:
        raise Refusal(f'config.data.source = {source!r} holds no text; give files that do')
    return sorted(documents, key=lambda document: document.name)


def split(documents: list[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """(train, held out): the share with the smallest hashes of their names is held out, in that order."""
    if len(documents) < 2:
        raise Refusal(
            f'the corpus is one document ({documents[0].name}) and a part of it must be held out; '
            'split it into several files, or into lines of a .jsonl'
        )
    ranked = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    count = min(max(1, round(held_out * len(ranked))), len(ranked) - 1)
    return sorted(ranked[count:], key=lambda document: document.name), ranked[:count]


def stdlib(_: str) -> Iterator[Document]:
    """The Python sources of the running interpreter's standard library, its tests aside."""
    root = Path(sysconfig.get_path('stdlib'))
    for path in root.rglob('*.py'):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            with tokenize.open(path) as file:  # honours a coding cookie
                yield Document(name.as_posix(), file.read())


def text(pattern: str) -> Iterator[Document]:
    """Each .txt is a document, and so is the field "text" of each line of a .jsonl."""
    paths = [Path(path) for path in glob.glob(pattern, recursive=True)]
    if not paths:
        raise Refusal(f'config.data.source = text:{pattern} matches no file; quote the pattern, check the path')
    for path in paths:
        if path.suffix not in READERS:
            raise Refusal(f'{path} cannot be read as text; allowed: {", ".join(READERS)}')
        try:
            yield from READERS[path.suffix](path)
        except UnicodeDecodeError as error:
            raise Refusal(f'{path} is not UTF-8 (byte {error.start}); convert it, or leave it out') from error
        except OSError as error:
            raise Refusal(f'{path} cannot be read: {error.strerror}') from error


def plain(path: Path) -> Iterator[Document]:
    yield Document(path.as_posix(), path.read_text(encoding='utf-8'))


def jsonl(path: Path) -> Iterator[Document]:
    with path.open('rb') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Document(f'{path.as_posix()}:{number}', field(line, path, number))


def field(line: bytes, path: Path, number: int) -> str:
    try:
        text = json.loads(line)['text']
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f'{path}, line {number}, is not an object with a "text" in UTF-8; mend it, or leave it out'
        ) from error
    return text


SOURCES = {'stdlib': stdlib, 'text': text}
READERS = {'.txt': plain, '.jsonl': jsonl}
