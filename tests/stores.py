"""Small corpora, their documents, and the stores that are prepared from them."""

import dataclasses
import json
import random

import numpy as np
import pytest
from tiny_specs import make_tiny_spec
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from sinklab.data.batches import Windows
from sinklab.data.prepare import Recipe, prepare_store
from sinklab.data.sources import open_source
from sinklab.data.store import Store
from sinklab.errors import UserError

END_TOKEN, BEGIN_TOKEN = 0, 1
WORDS = ['sink', ' token', ' Ünïcode 中文', '\n\n', '<|endoftext|>', ' 1234', '\t', 'λ', '\u2028', ' a' * 40]


def make_recipe(source, **changes):
    default = Recipe(source, 'train', 300, held_out=0.2, bos='none', end_token=END_TOKEN, fixed_token=BEGIN_TOKEN)
    return dataclasses.replace(default, **changes)


def encode_lines(texts, field='text', **fields):
    return ''.join(json.dumps({field: text, **fields}, ensure_ascii=False) + '\n' for text in texts).encode()


def write_source(path, texts, field='text'):
    """Write texts to a file, and return the source that names it."""
    path.write_bytes(encode_lines(texts, field))
    return f'text:{path}'


def write_mixture(folder, components):
    """Write a mixture of sources by domain, and return the source that names it."""
    (folder / 'mixture.json').write_text(json.dumps(components))
    return f'mixture:{folder}/mixture.json'


def read_documents(source):
    """Read the documents of a source."""
    return list(open_source(source).read_documents())


def get_source_error(source):
    """Return the one line of the error that refuses a source."""
    with pytest.raises(UserError) as error_info:
        read_documents(source)
    assert '\n' not in str(error_info.value)
    return str(error_info.value)


def make_store(folder, source, **changes):
    prepare_store(make_recipe(source, **changes), folder)
    return Store(folder)


def make_sharded_store(folder):
    """Make a store of many small shards in two domains."""
    components = {}
    for number, name in enumerate(('prose', 'code')):
        source = write_source(folder / f'{name}.jsonl', make_texts(40 * (number + 1), seed=number))
        components[name] = dict(source=source)
    return make_store(folder / 'store', write_mixture(folder, components), shard_tokens=150, bos='documents')


def read_document_ids(store, split, domain=''):
    """Return the ids of each document, without its beginning and end tokens."""
    row = store.get_tokens(split, domain)
    starts, _ = row.read_documents()
    ids = [row.read_ids(int(start), int(end)) for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]
    assert all(row[-1] == END_TOKEN for row in ids)
    assert all(row[0] == BEGIN_TOKEN for row in ids) or not store.has_bos
    return [row[int(store.has_bos) : -1].tolist() for row in ids]


def decode_documents(store, split, domain=''):
    return [
        store.load_tokenizer().decode(ids, skip_special_tokens=False)
        for ids in read_document_ids(store, split, domain)
    ]


def make_texts(count, seed=0, max_words=30):
    rng = random.Random(seed)
    return [f'{number} ' + ''.join(rng.choices(WORDS, k=rng.randint(1, max_words))) for number in range(count)]


def make_conversation(*turns):
    return {'messages': [dict(role=role, content=content) for role, content in turns]}


def write_chat(path, conversations):
    path.write_text(''.join(json.dumps(make_conversation(*turns)) + '\n' for turns in conversations))
    return f'chat:{path}'


def save_foreign_tokenizer(path):
    """Save a foreign tokenizer, whose special tokens have the last ids, and return the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        ['a text'], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    tokenizer.add_special_tokens(['</s>', '<s>'])
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


class TokenArray:
    """Row of tokens in memory."""

    def __init__(self, ids, loss_mask=None):
        self.tokens, self.loss_mask = np.asarray(ids), loss_mask

    def __len__(self):
        return len(self.tokens)

    def read_ids(self, start, end):
        return self.tokens[start:end]

    def read_loss_mask(self, start, end):
        return self.loss_mask[start:end]


def make_windows(token_arrays, label='train', share=1.0, **changes):
    """Make windows of 16 + 1 ids below 300, or with other fields of the data configuration."""
    return Windows(token_arrays, dataclasses.replace(make_tiny_spec().data, **changes), 300, label, share)
