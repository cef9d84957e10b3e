"""Split of a corpus into training and held-out documents, and a sample for the tokenizer."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator

from sinklab.data.documents import Document, Source, SourcePiece
from sinklab.errors import UserError

SAMPLE_CHARS = 1 << 26  # characters of the sample that the tokenizer is trained on
# The whitespace between two words, and the number of characters in which it is searched.
WORD_BORDER = re.compile(r'(?<=\S)\s+(?=\S)')
MAX_BORDER_CHARS = 1000


def survey_corpus(source: Source, held_out: float, with_texts: bool) -> tuple[int, list[str]]:
    """Choose the held-out documents of a corpus, and sample the training texts for the tokenizer.

    A corpus that fits the sample is split exactly. For a larger corpus the limit is the fraction `held_out` of the
    key range, so the held-out share is approximate.

    Args:
        source: The data source.
        held_out: Fraction of the documents to hold out.
        with_texts: Also sample texts.

    Returns:
        (limit, texts): documents whose key is below the limit are held out.

    Raises:
        UserError: A corpus that fits the sample has fewer than two documents.
    """
    if source.limit is None and (with_texts or source.size <= SAMPLE_CHARS):
        documents, is_complete = take_documents(source.read_documents(), SAMPLE_CHARS)
        if is_complete:
            limit = compute_key_threshold([hash_document_name(document.name) for document in documents], held_out)
            return limit, [document.text for document in documents if hash_document_name(document.name) >= limit]
    limit = int(held_out * 2**64) if source.limit is None else source.limit
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
    """Sample training texts of a large corpus: the first documents of the pieces, in order of their keys."""
    chars_per_piece = max(SAMPLE_CHARS // len(source.pieces), SAMPLE_CHARS >> 10)
    num_chars = 0
    texts = []
    for piece in sorted(source.pieces, key=lambda piece: hash_document_name(piece.name)):
        documents, _ = take_documents(piece.read(), chars_per_piece)
        texts += [
            document.text[:chars_per_piece] for document in documents if hash_document_name(document.name) >= limit
        ]
        num_chars += chars_per_piece if documents else 0
        if num_chars >= SAMPLE_CHARS:
            break
    return texts


def take_documents(documents: Iterator[Document], size: int) -> tuple[list[Document], bool]:
    """Return the first documents that are not blank, up to `size` characters, and whether they are all.

    The document that exceeds `size` is included.
    """
    first_documents = []
    num_chars = 0
    for document in documents:
        if not document.is_blank:
            first_documents.append(document)
            num_chars += len(document.text)
        if num_chars > size:
            return first_documents, False
    return first_documents, True


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
