"""Documents, and the sources that give them one at a time."""

import dataclasses
from collections.abc import Callable, Iterator

from sinklab.record import Refusal


@dataclasses.dataclass(frozen=True)
class Document:
    name: str  # unique within its source, and the same wherever the source lies
    parts: tuple[tuple[str, bool], ...]  # (text, whether it is to be predicted)
    domain: str  # '' where the source names none
    size: int  # bytes of the source that it stands for

    @property
    def text(self) -> str:
        return ''.join(text for text, _ in self.parts)

    @property
    def blank(self) -> bool:
        return all(not text or text.isspace() for text, _ in self.parts)


@dataclasses.dataclass(frozen=True)
class Damaged:
    where: str  # 'pile/03.jsonl.zst, line 17'
    why: str  # 'is not UTF-8 (byte 3)'
    size: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """What can be read by itself: a file, a range of a data set."""

    name: str
    size: int  # bytes, on disk
    read: Callable[[], Iterator[Document | Damaged]]  # lazily, in the memory of a document


@dataclasses.dataclass(frozen=True)
class Source:
    pieces: tuple[Piece, ...]  # in a fixed order
    identity: tuple  # changes whenever the content may have; fit for JSON
    weights: tuple[tuple[str, float], ...] | None = None  # (domain, share) of a mixture that has them; they sum to 1
    masked: bool = False  # whether its documents tell predicted parts from others
    limit: int | None = None  # below which a document's key holds it out, where the source says so itself

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def documents(self) -> Iterator[Document | Damaged]:
        for piece in self.pieces:
            yield from piece.read()


def intact(document: Document | Damaged) -> Document:
    if isinstance(document, Damaged):
        raise Refusal(f'{document.where} {document.why}; mend it, leave it out, or let prepare --lenient drop it')
    return document
