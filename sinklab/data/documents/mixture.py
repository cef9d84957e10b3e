"""Mixtures: a JSON file of sources, each of which is a domain."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents.document import Damaged, Document, Piece, Source
from sinklab.data.documents.files import line, reading
from sinklab.data.documents.formats import Fault, json_object
from sinklab.files.place import place
from sinklab.record import Refusal, unknown

HEAVIEST = 1e100  # weight, so that a sum of them is finite
FORM = '{"domain": {"source": "text:GLOB", "weight": 0.3}, ...}'


def mixture(given: str, rest: str, source: Callable[[str], Source]) -> Source:
    """Sources that are a domain each, with shares for all of them or for none; `source` gives one by its name."""
    components = components_of(given, place(rest))
    sources = {
        name: component(f'{given}, {line(repr(name))[1:-1]},', name, value, source)
        for name, value in components.items()
    }
    weights = {name: value['weight'] for name, value in components.items() if 'weight' in value}
    if without := weights and [name for name in components if name not in weights]:
        raise Refusal(f'{given} has no weight for {", ".join(without)}; give a weight to all, or to none')
    if len({part.masked for part in sources.values()}) > 1:
        raise Refusal(f'{given} mixes chat: with others, which mark no words; make a mixture of each')
    total = math.fsum(weights.values())
    return Source(
        pieces=tuple(in_domain(piece, name) for name, part in sources.items() for piece in part.pieces),
        identity=('mixture', *((name, weights.get(name), part.identity) for name, part in sources.items())),
        weights=tuple((name, weight / total) for name, weight in weights.items()) or None,
        masked=all(part.masked for part in sources.values()),
    )


def components_of(given: str, path: Path) -> dict[str, Any]:
    try:
        with reading(path):
            components = json_object(path.read_bytes(), unique_keys)
    except Fault as fault:
        raise Refusal(f'{given} {fault}; write {FORM}') from fault
    if not components:
        raise Refusal(f'{given} has no component; write {FORM}')
    return components


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys are different: of two that are the same, json keeps the last and says nothing."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Fault(f'has {twice[0]!r} twice')
    return dict(pairs)


def component(at: str, name: str, given: Any, source: Callable[[str], Source]) -> Source:
    if not name.isprintable() or not name or '/' in name:
        raise Refusal(f'{at} is the name of a domain; it must be a printable text without /')
    if not isinstance(given, dict) or not isinstance(given.get('source'), str):
        raise Refusal(f'{at} has no source; give it {{"source": "text:GLOB"}}')
    for key in given:
        if key not in ('source', 'weight'):
            raise Refusal(unknown(f'{at} {key!r}', key, ('source', 'weight')))
    weight = given.get('weight', 1)
    if type(weight) not in (int, float) or not 0 < weight <= HEAVIEST:
        shown = line(repr(weight))
        raise Refusal(f'{at} has the weight {shown}; it must be a number above 0 and at most {HEAVIEST:g}')
    if 'domain=' in given['source'].rpartition('#')[2]:
        raise Refusal(f'{at} names another domain behind #, and its documents have this one; leave domain= out')
    if given['source'].startswith('mixture:'):
        raise Refusal(f'{at} is a mixture itself; name its components here')
    try:
        return source(given['source'])
    except Refusal as error:
        raise Refusal(f'{at} {error}') from error


def in_domain(piece: Piece, name: str) -> Piece:
    def read() -> Iterator[Document | Damaged]:
        for found in piece.read():
            known = dict(name=f'{name}/{found.name}', domain=name) if isinstance(found, Document) else {}
            yield dataclasses.replace(found, **known)

    return dataclasses.replace(piece, name=f'{name}/{piece.name}', read=read)
