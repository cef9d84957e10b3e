"""Sources: what --source and config.data.source may name."""

import dataclasses
import itertools
import math
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents import catalog
from sinklab.data.documents import formats as files
from sinklab.data.documents.document import Damaged, Document, Piece, Source
from sinklab.data.documents.formats import Fault
from sinklab.record import Refusal, unknown

LEFT_OUT = {'site-packages', 'test', 'tests', 'idle_test'}
ROLES = ('system', 'user', 'assistant')
PIECES = 64  # of a data set of the catalogue
HEAVIEST = 1e100  # weight, so that a sum of them is finite


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


def source(given: str) -> Source:
    kinds = {form.partition(':')[0]: kind for form, kind in SOURCES.items()}
    kind, _, rest = given.partition(':')
    if kind not in kinds:
        file = f'; for the file, give text:{given}' if os.path.exists(given) else ''
        raise Refusal(unknown(given, kind, SOURCES, 'sources') + file)
    return kinds[kind](given, rest)


def stdlib(given: str, rest: str) -> Source:
    """The Python sources of the running interpreter's standard library, its tests aside."""
    if rest:
        raise Refusal(f'{given} is more than stdlib, which is the whole library; leave :{rest} out')
    root = Path(sysconfig.get_path('stdlib'))
    names = sorted(path.relative_to(root).as_posix() for path in modules(root))
    return of_files('stdlib', [(name, root / name) for name in names], lambda name, path: module(name, path))


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
    pattern, fields = options(given, rest, 'text')
    found = matching(given, pattern, files.FORMATS)
    for _, path in found:
        if form(path) is files.TEXT and fields != Fields('text', ''):
            raise Refusal(
                f'{given} names fields, and {path} has none; leave out what follows #, or match other files'
            )
    return of_records('text', found, fields, plain)


def chat(given: str, rest: str) -> Source:
    """Each line or row is a conversation, of which the words of the assistant are to be predicted."""
    pattern, fields = options(given, rest, 'messages')
    allowed = [suffix for suffix, format in files.FORMATS.items() if format is not files.TEXT]
    return of_records('chat', matching(given, pattern, allowed), fields, conversation, masked=True)


def tfds(given: str, rest: str) -> Source:
    """Each example of a split of a data set of the catalogue of TensorFlow Datasets is a document."""
    name, fields = options(given, rest, '')
    split = catalog.split(given, name)
    fields = Fields(fields.content or split.only_text(), fields.domain)
    split.check(fields.content, fields.domain)
    count = min(PIECES, len(split))
    bounds = [len(split) * number // count for number in range(count + 1)]

    def piece(start: int, stop: int) -> Piece:
        read = lambda: told(split.records(start, stop), dict, fields, plain)  # noqa: E731
        return Piece(f'{name}:{start}-{stop}', split.behind(stop) - split.behind(start), read)

    pieces = tuple(itertools.starmap(piece, itertools.pairwise(bounds)))
    return Source(pieces, ('tfds', *dataclasses.astuple(fields), *split.identity))


def mixture(given: str, rest: str) -> Source:
    """Sources that are a domain each, with shares for all of them or for none."""
    components = mapping(given, Path(rest))
    sources = {
        name: component(f'{given}, {files.line(repr(name))[1:-1]},', name, value)
        for name, value in components.items()
    }
    weights = {name: value['weight'] for name, value in components.items() if 'weight' in value}
    if without := weights and [name for name in components if name not in weights]:
        raise Refusal(f'{given} has no weight for {", ".join(without)}; give a weight to all, or to none')
    if len({part.masked for part in sources.values()}) > 1:
        raise Refusal(
            f'{given} mixes chat: with others, and only a chat tells predicted parts; make a mixture of each'
        )
    total = math.fsum(weights.values())
    return Source(
        pieces=tuple(labelled(piece, name) for name, part in sources.items() for piece in part.pieces),
        identity=('mixture', *((name, weights.get(name), part.identity) for name, part in sources.items())),
        weights=tuple((name, weight / total) for name, weight in weights.items()) or None,
        masked=all(part.masked for part in sources.values()),
    )


def mapping(given: str, path: Path) -> dict[str, Any]:
    try:
        with files.reading(path):
            components = files.parsed(path.read_bytes(), once)
    except Fault as fault:
        raise Refusal(
            f'{given} {fault}; write {{"domain": {{"source": "text:GLOB", "weight": 0.3}}, ...}}'
        ) from fault
    if not components:
        raise Refusal(f'{given} has no component; write {{"domain": {{"source": "text:GLOB", "weight": 0.3}}, ...}}')
    return components


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys are different: of two that are the same, json keeps the last and says nothing."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Fault(f'has {twice[0]!r} twice')
    return dict(pairs)


def component(at: str, name: str, given: Any) -> Source:
    if not name.isprintable() or not name or '/' in name:
        raise Refusal(f'{at} is the name of a domain; it must be a printable text without /')
    if not isinstance(given, dict) or not isinstance(given.get('source'), str):
        raise Refusal(f'{at} has no source; give it {{"source": "text:GLOB"}}')
    for key in given:
        if key not in ('source', 'weight'):
            raise Refusal(unknown(f'{at} {key!r}', key, ('source', 'weight')))
    weight = given.get('weight', 1)
    if type(weight) not in (int, float) or not 0 < weight <= HEAVIEST:
        shown = files.line(repr(weight))
        raise Refusal(f'{at} has the weight {shown}; it must be a number above 0 and at most {HEAVIEST:g}')
    if 'domain=' in given['source'].rpartition('#')[2]:
        raise Refusal(f'{at} names another domain behind #, and its documents have this one; leave domain= out')
    if given['source'].startswith('mixture:'):
        raise Refusal(f'{at} is a mixture itself; name its components here')
    try:
        return source(given['source'])
    except Refusal as error:
        raise Refusal(f'{at} {error}') from error


def labelled(piece: Piece, name: str) -> Piece:
    def read() -> Iterator[Document | Damaged]:
        for found in piece.read():
            if isinstance(found, Document):
                yield dataclasses.replace(found, name=f'{name}/{found.name}', domain=name)
            else:
                yield found

    return dataclasses.replace(piece, name=f'{name}/{piece.name}', read=read)


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


def matching(given: str, pattern: str, suffixes: Iterable[str]) -> list[tuple[str, Path]]:
    found = files.found(pattern)
    if not found:
        if os.path.isdir(pattern):
            raise Refusal(f'{given} is a folder; name its files, as in {pattern}/*.txt, and quote the pattern')
        raise Refusal(f'{given} matches no file; quote the pattern, check the path')
    for _, path in found:
        if not str(path).endswith(tuple(suffixes)):
            raise Refusal(f'{given} matches {path}, which cannot be read; allowed: {", ".join(suffixes)}')
    return found


def form(path: Path) -> files.Format:
    return next(format for suffix, format in files.FORMATS.items() if str(path).endswith(suffix))


def of_files(kind: str, found: list[tuple[str, Path]], read: Callable, *also: str, masked: bool = False) -> Source:
    pieces, identity = [], [kind, *also]
    for name, path in found:
        with files.reading(path):
            status = os.stat(path)
        identity.append((name, status.st_size, status.st_mtime_ns))
        pieces.append(Piece(name, status.st_size, lambda name=name, path=path: read(name, path)))
    return Source(tuple(pieces), tuple(identity), masked=masked)


def of_records(
    kind: str, found: list[tuple[str, Path]], fields: Fields, content: Content, masked: bool = False
) -> Source:
    def read(name: str, path: Path) -> Iterator[Document | Damaged]:
        format = form(path)
        records = (
            (f'{name}:{number}', f'{path}, {format.unit} {number}', record, size)
            if number
            else (name, str(path), record, size)
            for number, record, size in format.records(path, fields.columns)
        )
        return told(records, format.fields, fields, content)

    return of_files(kind, found, read, fields.content, fields.domain, masked=masked)


def told(records: Iterable, opened: Callable, fields: Fields, content: Content) -> Iterator[Document | Damaged]:
    for name, where, record, size in records:
        try:
            values = opened(record)
            domain = files.string(values, fields.domain) if fields.domain else ''
            yield Document(name, content(values, fields.content), domain, size)
        except Fault as fault:
            yield Damaged(where, str(fault), size)


def plain(values: dict[str, Any], path: str) -> Parts:
    return ((files.string(values, path), True),)


def conversation(values: dict[str, Any], path: str) -> Parts:
    """<|user|>, newline, words, newline, <|assistant|>, newline, words that are predicted, newline, ..."""
    messages = files.at(values, path)
    if not isinstance(messages, list):
        raise Fault(f'has a "{path}" that is no list of messages')
    said = []
    for message in messages:
        role, words = files.string(message, 'role'), files.string(message, 'content')
        if role not in ROLES:
            raise Fault(f'has a message of the role {role[:40]!r} (allowed: {", ".join(ROLES)})')
        said += [('\n' if said else '', False), (f'<|{role}|>\n', False), (words, role == 'assistant')]
    runs = itertools.groupby(filter(lambda part: part[0], said), key=lambda part: part[1])
    parts = tuple((''.join(text for text, _ in run), predicted) for predicted, run in runs)
    if not any(predicted for _, predicted in parts):
        raise Fault('has no words of an assistant')
    return parts


SOURCES = {
    'stdlib': stdlib,
    'text:GLOB': text,
    'chat:GLOB': chat,
    'tfds:NAME[:SPLIT]': tfds,
    'mixture:FILE': mixture,
}
