"""Tokenizers: a given tokenizer.json, or a byte-level BPE trained here."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinklab.files.place import place
from sinklab.files.validation import JSON_BYTES, read_bounded
from sinklab.record import Refusal

SPECIAL_TOKENS = ['<|endoftext|>', '<|padding|>']  # ids 0 and 1, as in GPT-NeoX's
LONGEST = 1 << 20  # characters tokenized at once
SEEN, TRIES = 256, 200  # characters on each side of a cut that are compared, and places that are tried


def parse(text: str, name: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, in which no text spells a special token, and nothing is cut or padded."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise Refusal(f'{name} is no tokenizer ({error}); give a tokenizer.json of Hugging Face') from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read(file: str | Path) -> str:
    """The text of a tokenizer.json."""
    try:
        return read_bounded(place(file), JSON_BYTES).decode('utf-8')
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as error:
        raise Refusal(f'the tokenizer {file} cannot be read ({error}); give a tokenizer.json, or train') from error


def load(file: str | Path) -> Tokenizer:
    return parse(read(file), str(file))


def size(tokenizer: Tokenizer) -> int:
    """One more than its largest id, which may be more than it has tokens."""
    return 1 + max(tokenizer.get_vocab().values())


def digest(file: str) -> str:
    return hashlib.sha256(read(file).encode()).hexdigest()


def check(tokenizer: Tokenizer, end: int, fixed: int, name: str) -> None:
    """Refuses ids that cannot end documents, or stand at fixed places and as BOS."""
    added = tokenizer.get_added_tokens_decoder().items()
    special = {number: token.content for number, token in added if token.special}
    if end not in special:
        few = ', '.join(f'{number} {content}' for number, content in sorted(special.items())[:8])
        remedy = f'set end_token to one of: {few}' if few else 'it has none: add one, by add_special_tokens'
        raise Refusal(
            f'{name} has {tokenizer.id_to_token(end)!r} as its token {end}, which is to end documents and must be a '
            f'special one; {remedy}'
        )
    if tokenizer.id_to_token(fixed) is None or fixed == end:
        raise Refusal(f'{name} has no token {fixed} beside its end {end}, to be fixed and BOS; set fixed_token')


def train(texts: Iterable[str], vocabulary: int) -> str:
    """The tokenizer.json of a byte-level BPE of at most `vocabulary` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def cut(text: str, tokenizer: Tokenizer, name: str) -> Iterator[str]:
    """A long text in pieces, to be tokenized one at a time; their ids are those of the whole text."""
    start = 0
    while len(text) - start > LONGEST:
        end = next((place for place in word_ends(text, start + LONGEST) if separates(tokenizer, text, place)), None)
        if end is None:
            raise Refusal(
                f'{name} has {len(text):,} characters, too many at once, and its tokenizer lets it be cut nowhere '
                f'near character {start + LONGEST:,}; split the document'
            )
        yield text[start:end]
        start = end
    yield text[start:]


def word_ends(text: str, end: int) -> Iterator[int]:
    """Ends of words before a place, the nearest first."""
    before = range(end, end - LONGEST // 2, -1)
    ends = (place for place in before if text[place - 1].isalnum() and not text[place].isalnum())
    return itertools.islice(ends, TRIES)


def separates(tokenizer: Tokenizer, text: str, place: int) -> bool:
    """Whether the text around a place has the ids of its two sides, tokenized apart."""
    around = (text[place - SEEN : place + SEEN], text[place - SEEN : place], text[place : place + SEEN])
    whole, left, right = (tokenizer.encode(side, add_special_tokens=False).ids for side in around)
    return whole == left + right
