"""Tokens: documents as ids, tokenized once per machine and kept by content digest."""

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinklab import spec
from sinklab.data.documents import Document, read, split
from sinklab.record import Refusal

END_OF_TEXT, FIXED_TOKEN = 0, 1  # the ids that GPT-NeoX's tokenizer gives these
BEGIN = FIXED_TOKEN  # the BOS of rows that have one
SPECIAL_TOKENS = ['<|endoftext|>', '<|padding|>']
FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Ids of the documents on each side of the split, each closed by END_OF_TEXT and, if asked, opened by BEGIN."""

    digest: str
    train: np.ndarray
    held_out: np.ndarray
    held_out_starts: np.ndarray  # where each held-out document starts, and where the last one ends
    opened: bool

    @property
    def text_starts(self) -> np.ndarray:
        """Where the text of each held-out document starts, after its BEGIN."""
        return self.held_out_starts[:-1] + self.opened


def tokens(data: spec.Data, vocabulary: int) -> Tokens:
    """The tokens of a source: from the cache, or made now and put there."""
    if data.tokenizer != 'train' and not Path(data.tokenizer).is_file():
        raise Refusal(f'config.data.tokenizer = {data.tokenizer!r} is no file; give a tokenizer.json, or train')
    documents = read(data.source)
    folder = cache() / digest(documents, data, vocabulary)
    if not folder.exists():
        build(folder, documents, data, vocabulary)
    return load(folder, vocabulary, opened(data))


def opened(data: spec.Data) -> bool:
    return data.bos == 'documents'


def cache() -> Path:
    """$SINKLAB_CACHE, or sinklab in the user's cache folder."""
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(os.environ.get('SINKLAB_CACHE') or Path(home) / 'sinklab') / 'tokens'


def digest(documents: list[Document], data: spec.Data, vocabulary: int) -> str:
    recipe = vocabulary if data.tokenizer == 'train' else Path(data.tokenizer).read_text(encoding='utf-8')
    sha = hashlib.sha256(json.dumps([FORMAT, data.held_out, recipe, data.bos]).encode())
    for document in documents:
        sha.update(json.dumps([document.name, document.text]).encode())
    return sha.hexdigest()[:16]


def build(folder: Path, documents: list[Document], data: spec.Data, vocabulary: int) -> None:
    """Tokenizes beside `folder` and renames when whole: no half of one is ever seen under its name."""
    train, held_out = split(documents, data.held_out)
    size = sum(len(document.text) for document in documents) / 1e6
    print(f'tokenizing {len(documents)} documents, {size:.1f} MB, into {folder}', file=sys.stderr)
    tokenizer = learn(train, vocabulary) if data.tokenizer == 'train' else given(data.tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as unfinished:
            write(Path(unfinished), tokenizer, train, held_out, [BEGIN] * opened(data))
            os.rename(unfinished, folder)
    except OSError as error:
        if not folder.exists():  # where it does, another process was faster
            raise Refusal(
                f'{folder} cannot be written ({error.strerror}); make room, or set SINKLAB_CACHE to another folder'
            ) from error


def given(file: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the library raises nothing narrower
        raise Refusal(
            f'{file} is no tokenizer ({error}); give a tokenizer.json of Hugging Face tokenizers'
        ) from error
    if (found := [tokenizer.id_to_token(number) for number in range(2)]) != SPECIAL_TOKENS:
        raise Refusal(
            f'{file} has {found} as its tokens 0 and 1, and documents end with 0 and are fixed with 1: give one that '
            f'has {SPECIAL_TOKENS} there, as GPT-NeoX and those trained here have'
        )
    return tokenizer


def learn(documents: list[Document], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def write(
    folder: Path, tokenizer: Tokenizer, train: list[Document], held_out: list[Document], opening: list[int]
) -> None:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    tokenizer.save(str(folder / 'tokenizer.json'))
    for name, documents in (('train', train), ('held_out', held_out)):
        texts = [document.text for document in documents]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        rows = [np.array([*opening, *encoding.ids, END_OF_TEXT], dtype) for encoding in encodings]
        np.save(folder / f'{name}.npy', np.concatenate(rows))
        np.save(folder / f'{name}_starts.npy', np.cumsum([0, *map(len, rows)]))


def load(folder: Path, vocabulary: int, opened: bool) -> Tokens:
    names = ('train', 'held_out', 'held_out_starts')
    try:
        arrays = {name: np.load(folder / f'{name}.npy', mmap_mode='r') for name in names}
    except (OSError, ValueError, EOFError) as error:
        raise Refusal(f'the tokens in {folder} are damaged ({error}); delete it, and they are made anew') from error
    largest = int(max(arrays['train'].max(), arrays['held_out'].max()))
    if largest >= vocabulary:
        raise Refusal(
            f'config.model.vocabulary is {vocabulary}, but the tokenizer gives ids up to {largest}; '
            f'set config.model.vocabulary to at least {largest + 1}'
        )
    return Tokens(folder.name, **arrays, opened=opened)
