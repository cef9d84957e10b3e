"""Documents, and data sources that yield documents one at a time."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from sinklab.errors import UserError


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a source.

    Attributes:
        name: Unique within the source, and independent of where the source is stored.
        parts: Pairs (text, whether the text is in the loss).
        domain: Domain name; '' if the source names none.
        size: Bytes of the source that the document accounts for, used for progress.
    """

    name: str
    parts: tuple[tuple[str, bool], ...]
    domain: str
    size: int

    @property
    def text(self) -> str:
        return ''.join(text for text, _ in self.parts)

    @property
    def is_blank(self) -> bool:
        return all(not text or text.isspace() for text, _ in self.parts)


@dataclasses.dataclass(frozen=True)
class DamagedDocument:
    """A document that cannot be read.

    Attributes:
        location: Where the document is, such as 'pile/03.jsonl.zst, line 17'.
        reason: Why it cannot be read, such as 'is not UTF-8 (byte 3)'.
        size: Bytes of the source that the document accounts for, used for progress.
    """

    location: str
    reason: str
    size: int


@dataclasses.dataclass(frozen=True)
class SourcePiece:
    """A part of a source that can be read independently: a file, or a range of examples of a data set.

    Attributes:
        name: Unique within the source.
        size: Bytes on disk.
        read: Function without arguments that yields the documents one at a time.
    """

    name: str
    size: int
    read: Callable[[], Iterator[Document | DamagedDocument]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A data source: documents in pieces that can be read in parallel.

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

    def read_documents(self) -> Iterator[Document | DamagedDocument]:
        for piece in self.pieces:
            yield from piece.read()


def require_intact(document: Document | DamagedDocument) -> Document:
    """Return the document, or raise UserError if it is damaged."""
    if isinstance(document, DamagedDocument):
        raise UserError(
            f'{document.location} {document.reason}; repair it, remove it, or drop it with prepare --lenient'
        )
    return document
