"""Mixtures: a JSON file of sources, each of which is a domain."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinklab.data.documents.document import DamagedDocument, Document, SourcePiece, Source
from sinklab.data.documents.files import shorten_text, translate_read_errors
from sinklab.data.documents.formats import RecordError, parse_json_object
from sinklab.files.place import parse_path
from sinklab.record import UserError, format_unknown_name

MAX_WEIGHT = 1e100  # weight, so that a sum of them is finite
MIXTURE_FORM = '{"domain": {"source": "text:GLOB", "weight": 0.3}, ...}'


def open_mixture(source_name: str, argument: str, open_part: Callable[[str], Source]) -> Source:
    """Sources that are a domain each, with shares for all of them or for none; `source` gives one by its name."""
    components = read_components(source_name, parse_path(argument))
    sources = {
        name: open_component(f'{source_name}, {shorten_text(repr(name))[1:-1]},', name, value, open_part)
        for name, value in components.items()
    }
    weights = {name: value['weight'] for name, value in components.items() if 'weight' in value}
    if unweighted := weights and [name for name in components if name not in weights]:
        raise UserError(f'{source_name} has no weight for {", ".join(unweighted)}; give a weight to all, or to none')
    if len({part.masked for part in sources.values()}) > 1:
        raise UserError(f'{source_name} mixes chat: with others, which mark no words; make a mixture of each')
    total = math.fsum(weights.values())
    return Source(
        pieces=tuple(set_domain(piece, name) for name, part in sources.items() for piece in part.pieces),
        identity=('mixture', *((name, weights.get(name), part.identity) for name, part in sources.items())),
        weights=tuple((name, weight / total) for name, weight in weights.items()) or None,
        masked=all(part.masked for part in sources.values()),
    )


def read_components(source_name: str, path: Path) -> dict[str, Any]:
    try:
        with translate_read_errors(path):
            components = parse_json_object(path.read_bytes(), build_unique_dict)
    except RecordError as fault:
        raise UserError(f'{source_name} {fault}; write {MIXTURE_FORM}') from fault
    if not components:
        raise UserError(f'{source_name} has no component; write {MIXTURE_FORM}')
    return components


def build_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys are different: of two that are the same, json keeps the last and says nothing."""
    names = [name for name, _ in pairs]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise RecordError(f'has {duplicates[0]!r} twice')
    return dict(pairs)


def open_component(label: str, name: str, value: Any, open_part: Callable[[str], Source]) -> Source:
    if not name.isprintable() or not name or '/' in name:
        raise UserError(f'{label} is the name of a domain; it must be a printable text without /')
    if not isinstance(value, dict) or not isinstance(value.get('source'), str):
        raise UserError(f'{label} has no source; give it {{"source": "text:GLOB"}}')
    for key in value:
        if key not in ('source', 'weight'):
            raise UserError(format_unknown_name(f'{label} {key!r}', key, ('source', 'weight')))
    weight = value.get('weight', 1)
    if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
        weight_text = shorten_text(repr(weight))
        raise UserError(f'{label} has the weight {weight_text}; it must be a number above 0 and at most {MAX_WEIGHT:g}')
    if 'domain=' in value['source'].rpartition('#')[2]:
        raise UserError(f'{label} names another domain behind #, and its documents have this one; leave domain= out')
    if value['source'].startswith('mixture:'):
        raise UserError(f'{label} is a mixture itself; name its components here')
    try:
        return open_part(value['source'])
    except UserError as error:
        raise UserError(f'{label} {error}') from error


def set_domain(piece: SourcePiece, name: str) -> SourcePiece:
    def read() -> Iterator[Document | DamagedDocument]:
        for document in piece.read():
            changes = dict(name=f'{name}/{document.name}', domain=name) if isinstance(document, Document) else {}
            yield dataclasses.replace(document, **changes)

    return dataclasses.replace(piece, name=f'{name}/{piece.name}', read=read)
