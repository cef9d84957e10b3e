"""Split of a corpus into training and held-out documents, and a sample for the tokenizer."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator

from sinklab.data.documents import Document, Source, SourcePiece
from sinklab.errors import UserError

SAMPLE_CHARS = 1 << 26  # characters of the sample that the tokenizer is trained on
MAX_SAMPLED_PIECES = 1 << 10
# The whitespace between two words, and the number of characters in which it is searched.
WORD_BORDER = re.compile(r'(?<=\S)\s+(?=\S)')
MAX_BORDER_CHARS = 1000


def survey_corpus(source: Source, held_out: float, with_texts: bool) -> tuple[int, list[str]]:
    """Choose the held-out documents of a corpus, and sample the training texts for the tokenizer.

    A corpus of at most SAMPLE_CHARS bytes is split exactly. For a larger corpus the limit is the fraction `held_out`
    of the key range, so the held-out share is approximate.

    Args:
        source: The data source.
        held_out: Fraction of the documents to hold out.
        with_texts: Also sample texts.

    Returns:
        (limit, texts): documents whose key is below the limit are held out.

    Raises:
        UserError: A corpus that is split exactly has fewer than two documents.
    """
    limit = source.limit
    if limit is None and source.size <= SAMPLE_CHARS:
        names = [document.name for document in source.read_documents() if not document.is_blank]
        limit = compute_key_threshold([hash_document_name(name) for name in names], held_out)
    if limit is None:
        limit = int(held_out * 2**64)
    return limit, sample_pieces(source, limit) if with_texts else []


def split_single_text(source: Source, held_out: float) -> Source:
    """Split a source that has only one document with text into a training and a held-out document.

    The source is returned unchanged if it has more documents, has a loss mask, or has a text that is too short.
    """
    documents = source.read_documents()
    first_two = list(itertools.islice((document for document in documents if not document.is_blank), 2))
    split_pair = split_document(first_two[0], held_out) if len(first_two) == 1 and not source.masked else None
    if split_pair is None:
        return source

    def read() -> Iterator[Document]:
        for document in source.read_documents():
            pair = None if document.is_blank else split_document(document, held_out)
            assert document.is_blank or pair, f'{document.name} has changed'
            yield from pair or (document,)

    piece = SourcePiece(first_two[0].name, source.size, read)
    return dataclasses.replace(source, pieces=(piece,), limit=hash_document_name(split_pair[0].name))


def split_document(document: Document, held_out: float) -> tuple[Document, Document] | None:
    """Split a document between two words.

    The keys of the two new names decide the split: a smaller key is held out.

    Returns:
        (training document, held-out document); None if the text is too short or a part would be blank.
    """
    text, names = document.text, [f'{document.name}#{number}' for number in (1, 2)]
    if len(text) < 2 * MAX_BORDER_CHARS:
        return None
    is_first_held_out = hash_document_name(names[0]) < hash_document_name(names[1])
    end = int((held_out if is_first_held_out else 1 - held_out) * len(text))
    if border := WORD_BORDER.search(text, end, end + MAX_BORDER_CHARS):
        end = border.start()
    head = Document(names[0], ((text[:end], True),), document.domain)
    tail = Document(names[1], ((text[end:], True),), document.domain)
    if head.is_blank or tail.is_blank:
        return None
    return (tail, head) if is_first_held_out else (head, tail)


def sample_pieces(source: Source, limit: int) -> list[str]:
    """Return all training texts of a small corpus, or the first ones of each piece of a large corpus."""
    pieces = list(source.pieces)
    chars_per_piece = SAMPLE_CHARS
    if source.size > SAMPLE_CHARS:
        pieces = sorted(pieces, key=lambda piece: hash_document_name(piece.name))[:MAX_SAMPLED_PIECES]
        chars_per_piece = SAMPLE_CHARS // len(pieces)
    texts = []
    for piece in pieces:
        num_chars = 0
        for document in piece.read():
            if num_chars >= chars_per_piece:
                break
            if not document.is_blank and hash_document_name(document.name) >= limit:
                texts.append(document.text[:chars_per_piece])
                num_chars += len(texts[-1])
    return texts


def compute_key_threshold(keys: list[int], held_out: float) -> int:
    """Compute the key limit that holds out a fraction of documents and leaves at least one on each side.

    Raises:
        UserError: There are fewer than two keys.
    """
    if len(keys) < 2:
        raise UserError(
            f'the corpus has {len(keys) or "no"} document with readable text, and a part must be held '
            'out; give more files, or lines of a .jsonl'
        )
    count = min(max(1, round(held_out * len(keys))), len(keys) - 1)
    return sorted(keys)[count]


def hash_document_name(name: str) -> int:
    """Hash a document name to the 64-bit key that decides whether the document is held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], 'big')
