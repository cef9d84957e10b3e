"""Tokenizers: trained here or by someone else, and texts that are too long for them."""

import dataclasses

import numpy as np
import pytest
from stores import BEGIN, END, corpus_of, documents, made, other_tokenizer, recipe, written
from tokenizers import Tokenizer

from sinklab.data import tokenizer
from sinklab.data.prepare import prepare_store
from sinklab.data.store import Store
from sinklab.errors import UserError


def test_a_text_cannot_spell_a_special_token(tmp_path):
    store = made(tmp_path / 'store', written(tmp_path / 'a.jsonl', ['a<|endoftext|>b<|padding|>c'] * 5))
    ids = [ids for side in ('train', 'held_out') for ids in documents(store, side)]
    assert not any({END, BEGIN} & set(row) for row in ids)


def test_a_long_document_is_cut_where_that_changes_no_token(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    long = ' '.join(corpus_of(400))
    store = made(tmp_path / 'store', written(tmp_path / 'a.jsonl', [long, 'short one', 'another']))
    whole = store.load_tokenizer().encode(long, add_special_tokens=False).ids
    assert whole in documents(store, 'train') + documents(store, 'held_out')


def test_a_long_document_that_cannot_be_cut_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    with pytest.raises(UserError, match=r'a\.jsonl:2 has 5,000 characters.*split the document'):
        made(tmp_path / 'store', written(tmp_path / 'a.jsonl', ['short', 'x' * 5000, 'another']))


def test_a_tokenizer_of_someone_else_is_taken_with_its_own_special_tokens(tmp_path):
    size = other_tokenizer(tmp_path / 'other.json')
    source = written(tmp_path / 'a.jsonl', corpus_of(9))
    asked = recipe(source, tokenizer=str(tmp_path / 'other.json'), vocabulary=None)
    with pytest.raises(UserError, match=rf'the end of documents.*set end_token to one of: {size - 2} </s>'):
        prepare_store(asked, tmp_path / 'store', 1)
    prepare_store(dataclasses.replace(asked, end_token=size - 2, fixed_token=size - 1), tmp_path / 'store', 1)
    row = Store(tmp_path / 'store').get_tokens('train', '')
    assert (row.read_ids(0, len(row)) == size - 2).sum() == len(row.read_documents()[0])


def test_a_token_that_texts_can_spell_cannot_end_documents(tmp_path):
    other_tokenizer(tmp_path / 'other.json')
    found = Tokenizer.from_file(str(tmp_path / 'other.json'))
    found.add_tokens(['<|im_end|>'])
    found.save(str(tmp_path / 'other.json'))
    asked = dict(tokenizer=str(tmp_path / 'other.json'), vocabulary=None, end_token=found.token_to_id('<|im_end|>'))
    with pytest.raises(UserError, match='must be a special token'):
        made(tmp_path / 'store', written(tmp_path / 'a.jsonl', corpus_of(9)), **asked)


@pytest.mark.slow
def test_large_vocabularies_take_four_bytes(tmp_path):
    other_tokenizer(tmp_path / 'other.json')
    wide = Tokenizer.from_file(str(tmp_path / 'other.json'))
    wide.add_tokens([f'word{number}' for number in range(70_000)])
    wide.save(str(tmp_path / 'wide.json'))
    end = wide.token_to_id('</s>')
    source = written(tmp_path / 'a.jsonl', ['word69999', 'word69998 a', 'b'])
    asked = dict(tokenizer=str(tmp_path / 'wide.json'), vocabulary=None, end_token=end, fixed_token=end + 1)
    store = made(tmp_path / 'store', source, **asked)
    assert store.dtype == np.uint32
    assert max(shard.largest for shard in store.shards) == wide.get_vocab_size() - 1
