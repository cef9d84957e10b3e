"""Tokenizers: a Hugging Face tokenizer.json, or a byte-level BPE that is trained; encoding of long texts."""

import hashlib
import itertools
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinklab.errors import UserError
from sinklab.storage.paths import parse_path

SPECIAL_TOKENS = ['<|endoftext|>', '<|padding|>']  # ids 0 and 1, as in GPT-NeoX's
MAX_ENCODED_CHARS = 1 << 17  # a longer text is tokenized in pieces of about so many characters
TEXTS_PER_BATCH = 256  # texts that are tokenized in parallel; each needs about 100 bytes a token meanwhile
WORD_END = re.compile(r'\w(?=\W)')
CUT_CONTEXT_CHARS = 256  # characters on each side of a cut that are compared
MAX_CUT_TRIES = 200


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    """Parse a tokenizer.json; its special tokens are not recognized in texts, and it neither truncates nor pads.

    Args:
        text: The content of the file.
        name: The name of the file, for the error message.

    Raises:
        UserError: The text is not a tokenizer.json.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{name} is not a tokenizer ({error}); give a tokenizer.json of Hugging Face') from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_json(file: str | Path) -> str:
    """Read a tokenizer.json; raise UserError if it is missing or not UTF-8."""
    try:
        return parse_path(file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'the tokenizer {file} cannot be read ({error}); give a tokenizer.json, or train') from error


def load_tokenizer(file: str | Path) -> Tokenizer:
    return parse_tokenizer(read_tokenizer_json(file), str(file))


def get_vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id, which may exceed the number of tokens."""
    return 1 + max(tokenizer.get_vocab().values())


def compute_tokenizer_digest(file: str) -> str:
    return hashlib.sha256(read_tokenizer_json(file).encode()).hexdigest()


def check_special_tokens(
    tokenizer: Tokenizer,
    end_token: int,
    fixed_token: int,
    name: str,
    fields: tuple[str, str] = ('end_token', 'fixed_token'),
) -> None:
    """Check that the ids can end documents and can be a BOS or a fixed token; `fields` are where a user sets them.

    Raises:
        UserError: `end_token` is not a special token, or `fixed_token` does not exist or is equal to it.
    """
    added = tokenizer.get_added_tokens_decoder().items()
    special = {number: token.content for number, token in added if token.special}
    if end_token not in special:
        examples = ', '.join(f'{number} {content}' for number, content in sorted(special.items())[:8])
        remedy = f'set {fields[0]} to one of: {examples}' if examples else 'add one with add_special_tokens'
        raise UserError(
            f'{name} has {tokenizer.id_to_token(end_token)!r} as its token {end_token}; the end of documents '
            f'must be a special token; {remedy}'
        )
    if tokenizer.id_to_token(fixed_token) is None or fixed_token == end_token:
        raise UserError(f'{name} has no token {fixed_token} other than its end {end_token}; set {fields[1]} (BOS)')


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> str:
    """Train a byte-level BPE with at most `vocabulary` ids, and return its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if (num_chars := sum(map(len, texts))) > MAX_ENCODED_CHARS:
        print(f'training a tokenizer of {vocabulary:,} ids on {num_chars:,} characters', file=sys.stderr, flush=True)
    # In a daemon thread, so that Ctrl-C ends the process while native code computes.
    thread = threading.Thread(target=tokenizer.train_from_iterator, args=(texts, trainer), daemon=True)
    thread.start()
    thread.join()
    return tokenizer.to_str(pretty=True)


def split_text(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Split a long text into pieces whose ids, one piece after another, are those of the whole text.

    A text that a tokenizer allows to cut nowhere (for example, one that adds a space to each text) is one piece.
    """
    end = 0
    while True:
        start = end
        end = len(text)
        if end - start > MAX_ENCODED_CHARS:
            word_ends = itertools.islice(WORD_END.finditer(text, start + MAX_ENCODED_CHARS), MAX_CUT_TRIES)
            end = next((match.end() for match in word_ends if is_safe_cut(tokenizer, text, match.end())), end)
        yield text[start:end]
        if end == len(text):
            return


def is_safe_cut(tokenizer: Tokenizer, text: str, position: int) -> bool:
    """Return whether the text around a position has the same ids if its two sides are tokenized separately."""
    contexts = (
        text[position - CUT_CONTEXT_CHARS : position + CUT_CONTEXT_CHARS],
        text[position - CUT_CONTEXT_CHARS : position],
        text[position : position + CUT_CONTEXT_CHARS],
    )
    joined, left, right = (tokenizer.encode(context, add_special_tokens=False).ids for context in contexts)
    return joined == left + right


def choose_ids_dtype(vocabulary: int) -> np.dtype:
    """Return the smallest unsigned dtype that can hold every id."""
    return np.dtype('<u2' if vocabulary <= 2**16 else '<u4')


def encode_texts(tokenizer: Tokenizer, ids_dtype: np.dtype, texts: list[str]) -> list[np.ndarray]:
    ids = []
    for first in range(0, len(texts), TEXTS_PER_BATCH):
        encodings = tokenizer.encode_batch_fast(texts[first : first + TEXTS_PER_BATCH], add_special_tokens=False)
        ids += [np.array(encoding.ids, ids_dtype) for encoding in encodings]
    return ids


def encode_long_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encode one text of any length."""
    return np.concatenate(encode_texts(tokenizer, np.dtype(np.int32), [*split_text(text, tokenizer)]))
