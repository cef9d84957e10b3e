"""Small corpora, what is read of them, and the stores that are made of them."""

import dataclasses
import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from sinklab.data.prepare import prepare_store
from sinklab.data.sources import open_source
from sinklab.data.store import Store
from sinklab.data.store_files import Recipe
from sinklab.errors import UserError

END, BEGIN = 0, 1
WORDS = ['sink', ' token', ' Ünïcode 中文', '\n\n', '<|endoftext|>', ' 1234', '\t', 'λ', '\u2028', ' a' * 40]


def recipe(source, **changes):
    plain = Recipe(source, 'train', 300, held_out=0.2, bos='none', end_token=END, fixed_token=BEGIN)
    return dataclasses.replace(plain, **changes)


def lines(texts, field='text', **more):
    return ''.join(json.dumps({field: text, **more}, ensure_ascii=False) + '\n' for text in texts).encode()


def written(path, texts, field='text'):
    """A source of these texts, and how prepare names them."""
    path.write_bytes(lines(texts, field))
    return f'text:{path}'


def mixture(folder, components):
    """A source of sources, by domain."""
    (folder / 'mixture.json').write_text(json.dumps(components))
    return f'mixture:{folder}/mixture.json'


def found(given):
    """The documents of a source."""
    return list(open_source(given).read_documents())


def refused(given):
    """The line that refuses a source."""
    with pytest.raises(UserError) as refusal:
        found(given)
    assert '\n' not in str(refusal.value)
    return str(refusal.value)


def made(folder, source, processes=1, **changes):
    prepare_store(recipe(source, **changes), folder, processes)
    return Store(folder)


def of_many_shards(folder):
    """A store of many small shards, in two domains."""
    parts = {}
    for number, name in enumerate(('prose', 'code')):
        source = written(folder / f'{name}.jsonl', corpus_of(40 * (number + 1), seed=number))
        parts[name] = dict(source=source)
    return made(folder / 'store', mixture(folder, parts), shard_tokens=150, bos='documents')


def documents(store, side, domain=''):
    """The ids of each document, without what opens and closes it."""
    row = store.get_tokens(side, domain)
    starts, _ = row.read_documents()
    ids = [row.read_ids(int(start), int(end)) for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]
    assert all(row[-1] == END for row in ids)
    assert all(row[0] == BEGIN for row in ids) or not store.has_bos
    return [row[int(store.has_bos) : -1].tolist() for row in ids]


def texts_of(store, side, domain=''):
    return [store.load_tokenizer().decode(ids, skip_special_tokens=False) for ids in documents(store, side, domain)]


def corpus_of(count, seed=0, words=30):
    rng = random.Random(seed)
    return [f'{number} ' + ''.join(rng.choices(WORDS, k=rng.randint(1, words))) for number in range(count)]


def talk(*turns):
    return {'messages': [dict(role=role, content=content) for role, content in turns]}


def chat(path, conversations):
    path.write_text(''.join(json.dumps(talk(*turns)) + '\n' for turns in conversations))
    return f'chat:{path}'


def other_tokenizer(path):
    """A tokenizer of someone else's, with its special tokens at the end."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.train_from_iterator(
        ['a text'], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    found.add_special_tokens(['</s>', '<s>'])
    found.save(str(path))
    return found.get_vocab_size()


class Array:
    """A row of tokens in memory."""

    def __init__(self, ids, predicted=None):
        self.tokens, self.told = np.asarray(ids), predicted

    def __len__(self):
        return len(self.tokens)

    def read_ids(self, start, end):
        return self.tokens[start:end]

    def read_loss_mask(self, start, end):
        return self.told[start:end]
