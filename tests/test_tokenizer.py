"""Tests of trained and external tokenizers, and of documents that are too long."""

import dataclasses

import numpy as np
import pytest
from stores import (
    BEGIN_TOKEN,
    END_TOKEN,
    make_recipe,
    make_store,
    make_texts,
    read_document_ids,
    save_foreign_tokenizer,
    write_source,
)
from tokenizers import Tokenizer

from sinklab.data import tokenizer
from sinklab.data.prepare import prepare_store
from sinklab.data.store import Store
from sinklab.errors import UserError


def test_text_does_not_encode_to_special_tokens(tmp_path):
    store = make_store(tmp_path / 'store', write_source(tmp_path / 'a.jsonl', ['a<|endoftext|>b<|padding|>c'] * 5))
    ids = [ids for side in ('train', 'held_out') for ids in read_document_ids(store, side)]
    assert not any({END_TOKEN, BEGIN_TOKEN} & set(row) for row in ids)


def test_long_document_is_split_without_changing_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    long_text = ' '.join(make_texts(400))
    store = make_store(tmp_path / 'store', write_source(tmp_path / 'a.jsonl', [long_text, 'short one', 'another']))
    expected_ids = store.load_tokenizer().encode(long_text, add_special_tokens=False).ids
    assert expected_ids in read_document_ids(store, 'train') + read_document_ids(store, 'held_out')


def test_long_document_without_split_point_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    with pytest.raises(UserError, match=r'a\.jsonl:2.*5,000'):
        make_store(tmp_path / 'store', write_source(tmp_path / 'a.jsonl', ['short', 'x' * 5000, 'another']))


def test_external_tokenizer_requires_end_token_and_uses_its_special_tokens(tmp_path):
    vocabulary_size = save_foreign_tokenizer(tmp_path / 'other.json')
    source = write_source(tmp_path / 'a.jsonl', make_texts(9))
    recipe = make_recipe(source, tokenizer=str(tmp_path / 'other.json'), vocabulary=None)
    with pytest.raises(UserError, match=rf'end_token.*{vocabulary_size - 2} </s>'):
        prepare_store(recipe, tmp_path / 'store', 1)
    prepare_store(
        dataclasses.replace(recipe, end_token=vocabulary_size - 2, fixed_token=vocabulary_size - 1),
        tmp_path / 'store',
        1,
    )
    row = Store(tmp_path / 'store').get_tokens('train', '')
    assert (row.read_ids(0, len(row)) == vocabulary_size - 2).sum() == len(row.read_documents()[0])


def test_regular_token_is_rejected_as_end_token(tmp_path):
    save_foreign_tokenizer(tmp_path / 'other.json')
    external_tokenizer = Tokenizer.from_file(str(tmp_path / 'other.json'))
    external_tokenizer.add_tokens(['<|im_end|>'])
    external_tokenizer.save(str(tmp_path / 'other.json'))
    options = dict(
        tokenizer=str(tmp_path / 'other.json'),
        vocabulary=None,
        end_token=external_tokenizer.token_to_id('<|im_end|>'),
    )
    with pytest.raises(UserError, match='special'):
        make_store(tmp_path / 'store', write_source(tmp_path / 'a.jsonl', make_texts(9)), **options)


@pytest.mark.slow
def test_large_vocabulary_is_stored_as_uint32(tmp_path):
    save_foreign_tokenizer(tmp_path / 'other.json')
    large_tokenizer = Tokenizer.from_file(str(tmp_path / 'other.json'))
    large_tokenizer.add_tokens([f'word{number}' for number in range(70_000)])
    large_tokenizer.save(str(tmp_path / 'wide.json'))
    end_token = large_tokenizer.token_to_id('</s>')
    source = write_source(tmp_path / 'a.jsonl', ['word69999', 'word69998 a', 'b'])
    options = dict(
        tokenizer=str(tmp_path / 'wide.json'), vocabulary=None, end_token=end_token, fixed_token=end_token + 1
    )
    store = make_store(tmp_path / 'store', source, **options)
    assert store.dtype == np.uint32
    assert max(shard.largest_id for shard in store.shards) == large_tokenizer.get_vocab_size() - 1
