"""Documents and data sources, which yield them one at a time."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from sinklab.schema import UserError


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a source.

    Attributes:
        name: Unique within its source, and the same wherever the source lies.
        parts: Pairs of a text and whether it is to be predicted.
        domain: '' where the source names none.
        size: Bytes of the source that it stands for.
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
        where: Such as 'pile/03.jsonl.zst, line 17'.
        why: Such as 'is not UTF-8 (byte 3)'.
        size: Bytes of the source that it stands for.
    """

    location: str
    reason: str
    size: int


@dataclasses.dataclass(frozen=True)
class SourcePiece:
    """A part of a source that can be read by itself: a file, or a range of a data set.

    Attributes:
        name: Unique within its source.
        size: Bytes on disk.
        read: Function without arguments that yields documents one at a time.
    """

    name: str
    size: int
    read: Callable[[], Iterator[Document | DamagedDocument]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A data source: documents in pieces that can be read at the same time.

    Attributes:
        pieces: In a fixed order, which is the order of the documents.
        identity: Values for JSON that change whenever the content may have changed; the token cache depends on them.
        weights: Pairs of a domain and its share, of a mixture that has them; shares sum to 1.
        masked: Some parts of its documents are not to be predicted.
        limit: Documents whose key is below it are held out, where the source decides that itself.
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
    if isinstance(document, DamagedDocument):
        raise UserError(
            f'{document.location} {document.reason}; mend it, leave it out, or let prepare --lenient drop it'
        )
    return document
