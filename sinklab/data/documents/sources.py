"""Data sources: what `--source` and `config.data.source` may name, in the table `SOURCES`."""

import dataclasses
import functools
import itertools
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sinklab.data.documents import buckets, catalog, files, formats, records
from sinklab.data.documents.document import Damaged, Document, Piece, Source, intact
from sinklab.data.documents.mixture import mixture
from sinklab.data.documents.records import Content, Fields
from sinklab.files.place import is_remote, place
from sinklab.record import Refusal, unknown

LEFT_OUT = {'site-packages', 'test', 'tests', 'idle_test'}
PIECES = 64  # of a data set of the catalogue


def source(given: str) -> Source:
    """Return the data source of a name, such as `text:corpus/*.txt`; nothing is read before its documents are.

    Args:
        given: The name: the kind, a colon, and what the kind needs, as `SOURCES` lists them. To add a kind is to
            write a function (name, what follows the colon) -> Source and to enter it there.

    Raises:
        Refusal: There is no such kind, or no such file.
    """
    kinds = {form.partition(':')[0]: kind for form, kind in SOURCES.items()}
    kind, _, rest = given.partition(':')
    if kind not in kinds:
        file = f'; for the file, give text:{given}' if os.path.exists(given) else ''
        raise Refusal(unknown(given, kind, SOURCES, 'sources') + file)
    return kinds[kind](given, rest)


def texts(given: str) -> list[str]:
    """Read the texts of a small corpus into memory, without those that are blank."""
    found = map(intact, source(given).documents())
    return [document.text for document in found if not document.blank]


def stdlib(given: str, rest: str) -> Source:
    """The Python sources of the running interpreter's standard library, its tests aside."""
    if rest:
        raise Refusal(f'{given} is more than stdlib, which is the whole library; leave :{rest} out')
    root = Path(sysconfig.get_path('stdlib'))
    names = sorted(path.relative_to(root).as_posix() for path in modules(root))
    return of_files('stdlib', [(name, root / name) for name in names], module)


def modules(root: Path) -> Iterator[Path]:
    """The .py files below a folder; installed packages, ten times as many, are never entered."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT
        yield from (Path(folder, name) for name in set(names) - LEFT_OUT if name.endswith('.py'))


def module(name: str, path: Path) -> Iterator[Document | Damaged]:
    size = path.stat().st_size
    try:
        with files.reading(path), tokenize.open(path) as file:  # honours a coding cookie
            yield Document(name, ((file.read(), True),), '', size)
    except (UnicodeDecodeError, SyntaxError) as error:
        yield Damaged(str(path), f'is not Python ({files.line(error)})', size)


def text(given: str, rest: str) -> Source:
    """Each .txt is a document, and so is a field of each line of a .jsonl and of each row of a .parquet."""
    pattern, fields = records.options(given, rest, 'text')
    found = matches(given, pattern, formats.FORMATS)
    for _, path in found:
        if formats.format_of(path) is formats.TEXT and fields != Fields('text', ''):
            raise Refusal(f'{given} names fields, and {path} has none; leave them out, or match other files')
    return of_records('text', found, fields, records.text)


def chat(given: str, rest: str) -> Source:
    """Each line or row is a conversation, of which the words of the assistant are to be predicted."""
    pattern, fields = records.options(given, rest, 'messages')
    allowed = [suffix for suffix, format in formats.FORMATS.items() if format is not formats.TEXT]
    return of_records('chat', matches(given, pattern, allowed), fields, records.conversation, masked=True)


def tfds(given: str, rest: str) -> Source:
    """Each example of a split of a data set of the catalogue of TensorFlow Datasets is a document."""
    name, fields = records.options(given, rest, '')
    split = catalog.split(given, name)
    fields = Fields(fields.content or split.only_text(), fields.domain)
    split.check(fields.content, fields.domain)
    count = min(PIECES, len(split))
    bounds = [len(split) * number // count for number in range(count + 1)]

    def piece(start: int, stop: int) -> Piece:
        def read() -> Iterator[Document | Damaged]:
            return records.documents(split.records(start, stop), dict, fields, records.text)

        return Piece(f'{name}:{start}-{stop}', split.behind(stop) - split.behind(start), read)

    pieces = tuple(itertools.starmap(piece, itertools.pairwise(bounds)))
    return Source(pieces, ('tfds', *dataclasses.astuple(fields), *split.identity))


def matches(given: str, pattern: str, suffixes: Iterable[str]) -> list[tuple[str, Path]]:
    found = (buckets if is_remote(pattern) else files).matches(pattern)
    if not found:
        if place(pattern).is_dir() if is_remote(pattern) else os.path.isdir(pattern):
            raise Refusal(f'{given} is a folder; name its files, as in {pattern}/*.txt, and quote the pattern')
        raise Refusal(f'{given} matches no file; quote the pattern, check the path')
    for _, path in found:
        if not str(path).endswith(tuple(suffixes)):
            raise Refusal(f'{given} matches {path}, which cannot be read; allowed: {", ".join(suffixes)}')
    return found


def of_files(kind: str, found: list[tuple[str, Path]], read: Callable, *also: str, masked: bool = False) -> Source:
    pieces, identity = [], [kind, *also]
    for name, path in found:
        size, mark = stamp(path)
        identity.append((name, size, mark))
        pieces.append(Piece(name, size, lambda name=name, path=path: read(name, path)))
    return Source(tuple(pieces), tuple(identity), masked=masked)


def stamp(path: Path | buckets.Object) -> tuple[int, int | str]:
    """(bytes, what changes with them) of a file."""
    if isinstance(path, buckets.Object):
        return path.size, path.mark
    with files.reading(path):
        status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def of_records(
    kind: str, found: list[tuple[str, Path]], fields: Fields, content: Content, masked: bool = False
) -> Source:
    def read(name: str, path: Path) -> Iterator[Document | Damaged]:
        format = formats.format_of(path)
        found = (
            (f'{name}:{number}', f'{path}, {format.unit} {number}', record, size)
            if number
            else (name, str(path), record, size)
            for number, record, size in format.records(path, fields.columns)
        )
        return records.documents(found, format.fields, fields, content)

    return of_files(kind, found, read, fields.content, fields.domain, masked=masked)


SOURCES = {
    'stdlib': stdlib,
    'text:GLOB': text,
    'chat:GLOB': chat,
    'tfds:NAME[:SPLIT]': tfds,
    'mixture:FILE': functools.partial(mixture, source=source),
}
