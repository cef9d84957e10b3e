"""What is known of a corpus before it is tokenized: what to make of it, its split, and a sample of its texts."""

import dataclasses
import hashlib
from collections.abc import Iterator

from sinklab.data.documents import Damaged, Document, Source
from sinklab.record import Refusal

SAMPLE = 1 << 26  # characters


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a store is made of, and how."""

    source: str
    tokenizer: str  # train, or a tokenizer.json
    vocabulary: int | None  # of a tokenizer trained here
    held_out: float
    bos: str
    end_token: int
    fixed_token: int
    lenient: bool = False  # damaged documents are dropped and counted, not refused
    shard_tokens: int = 1 << 24


def survey(recipe: Recipe, source: Source) -> tuple[int, list[str]]:
    """(the limit below which keys are held out, texts to train a tokenizer on).

    A corpus that is seen whole is split exactly; of a larger one, the share is that of the keys.
    """
    seen, whole = [], recipe.tokenizer == 'train' or source.size <= SAMPLE
    if whole:
        seen, whole = sample(source.documents(), SAMPLE, recipe)
    if whole:
        limit = exact([key(document.name) for document in seen], recipe.held_out)
    else:
        limit = int(recipe.held_out * 2**64)
        if recipe.tokenizer == 'train':
            pieces = [sample(piece.read(), SAMPLE // len(source.pieces), recipe) for piece in source.pieces]
            seen = [document for found, _ in pieces for document in found]
    return limit, [document.text for document in seen if key(document.name) >= limit]


def sample(found: Iterator[Document | Damaged], size: int, recipe: Recipe) -> tuple[list[Document], bool]:
    """(the first documents, of `size` characters, whether these are all)."""
    seen, taken = [], 0
    for document in found:
        if isinstance(document, Damaged) and recipe.lenient:
            continue
        if not intact(document).blank:
            seen.append(document)
            taken += len(document.text)
        if taken > size:
            return seen, False
    return seen, True


def intact(document: Document | Damaged) -> Document:
    if isinstance(document, Damaged):
        raise Refusal(
            f'{document.where} {document.why}; mend it, leave it out, or let prepare --lenient drop and count those'
        )
    return document


def exact(keys: list[int], held_out: float) -> int:
    """The limit that holds out a share of these keys, and leaves one at least on each side."""
    if len(keys) < 2:
        raise Refusal(
            f'the corpus has {len(keys) or "no"} document with text, and a part of it must be held out; '
            'give more files, or lines of a .jsonl'
        )
    count = min(max(1, round(held_out * len(keys))), len(keys) - 1)
    return sorted(keys)[count]


def key(name: str) -> int:
    """A number by which documents are in no order of theirs."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], 'big')
