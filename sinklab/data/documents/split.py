"""Which documents of a corpus are held out, and a sample of the others."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator

from sinklab.data.documents.document import Damaged, Document, Piece, Source, intact
from sinklab.record import Refusal

SAMPLE = 1 << 26  # characters
BORDER, NEAR = re.compile(r'(?<=\S)\s+(?=\S)'), 1000  # of two words; the most characters to it


def survey(source: Source, held_out: float, lenient: bool, texts: bool) -> tuple[int, list[str]]:
    """(the limit below which keys are held out, a sample of the other texts if `texts`).

    A corpus that fits the sample is split exactly; of a larger one, a share of all possible keys is held out.
    """
    if source.limit is None and (texts or source.size <= SAMPLE):
        seen, whole = sample(source.documents(), SAMPLE, lenient)
        if whole:
            limit = exact_limit([key(document.name) for document in seen], held_out)
            return limit, [document.text for document in seen if key(document.name) >= limit]
    limit = int(held_out * 2**64) if source.limit is None else source.limit
    return limit, sample_of_pieces(source, limit, lenient) if texts else []


def two_sided(source: Source, held_out: float) -> Source:
    """A source of one text as two documents, one to train on and one held out; any other source as it is."""
    full = (document for document in source.documents() if isinstance(document, Document) and not document.blank)
    alone = list(itertools.islice(full, 2))
    sides = halves(alone[0], held_out) if len(alone) == 1 and not source.masked else None
    if sides is None:
        return source

    def read() -> Iterator[Document | Damaged]:
        for found in source.documents():
            yield from (found,) if isinstance(found, Damaged) or found.blank else halves(found, held_out)

    return dataclasses.replace(source, pieces=(Piece(alone[0].name, source.size, read),), limit=key(sides[0].name))


def halves(document: Document, held_out: float) -> tuple[Document, Document] | None:
    """(what is trained on, what is held out) of a text that is cut between words; the smaller key is held out."""
    text, names = document.text, [f'{document.name}#{number}' for number in (1, 2)]
    if len(text) < 2 * NEAR:
        return None
    first = key(names[0]) < key(names[1])
    end = int((held_out if first else 1 - held_out) * len(text))
    if border := BORDER.search(text, end, end + NEAR):
        end = border.start()
    size = document.size * end // len(text)
    one = Document(names[0], ((text[:end], True),), document.domain, size)
    two = Document(names[1], ((text[end:], True),), document.domain, document.size - size)
    if one.blank or two.blank:
        return None
    return (two, one) if first else (one, two)


def sample_of_pieces(source: Source, limit: int, lenient: bool) -> list[str]:
    """Texts from all over a large corpus: the beginnings of its pieces, in the order of their keys."""
    share, taken, texts = max(SAMPLE // len(source.pieces), SAMPLE >> 10), 0, []
    for piece in sorted(source.pieces, key=lambda piece: key(piece.name)):
        seen, _ = sample(piece.read(), share, lenient)
        texts += [document.text[:share] for document in seen if key(document.name) >= limit]
        taken += share if seen else 0
        if taken >= SAMPLE:
            break
    return texts


def sample(found: Iterator[Document | Damaged], size: int, lenient: bool) -> tuple[list[Document], bool]:
    """(the first documents, of `size` characters, whether these are all)."""
    seen, taken = [], 0
    for document in found:
        if isinstance(document, Damaged) and lenient:
            continue
        if not intact(document).blank:
            seen.append(document)
            taken += len(document.text)
        if taken > size:
            return seen, False
    return seen, True


def exact_limit(keys: list[int], held_out: float) -> int:
    """The limit that holds out a share of these keys, and leaves one at least on each side."""
    if len(keys) < 2:
        raise Refusal(
            f'the corpus has {len(keys) or "no"} document with text that can be read, and a part of it must be held '
            'out; give more files, or lines of a .jsonl'
        )
    count = min(max(1, round(held_out * len(keys))), len(keys) - 1)
    return sorted(keys)[count]


def key(name: str) -> int:
    """A hash that decides whether a document is held out, whatever the order of the documents."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], 'big')
