"""Tests of trained and external tokenizers, and of long documents and words."""

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
from tokenizers import Tokenizer, models, normalizers, trainers

from sinklab.data import tokenizer
from sinklab.data.prepare import prepare_store
from sinklab.data.store import Store
from sinklab.errors import UserError


def test_text_does_not_encode_to_special_tokens(tmp_path):
    store = make_store(tmp_path / 'store', write_source(tmp_path / 'a.jsonl', ['a<|endoftext|>b<|padding|>c'] * 5))
    ids = [ids for side in ('train', 'held_out') for ids in read_document_ids(store, side)]
    assert not any({END_TOKEN, BEGIN_TOKEN} & set(row) for row in ids)


@pytest.mark.parametrize('separator', [' ', '\n', ', ', '。', "'s ", ''])
def test_pieces_of_long_text_have_ids_of_the_whole(separator, monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    text = separator.join(make_texts(200))
    trained = tokenizer.parse_tokenizer(tokenizer.train_tokenizer([text], 300), 'trained')
    pieces = [*tokenizer.split_text(text, trained)]
    assert ''.join(pieces) == text
    assert len(pieces) > 5
    assert tokenizer.encode_long_text(trained, text).tolist() == trained.encode(text).ids


def test_tokenizer_that_adds_a_space_to_each_text_encodes_long_text_at_once(monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    text = ' '.join(make_texts(400))
    foreign = Tokenizer(models.BPE(unk_token='<unk>'))
    foreign.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=['<unk>'], show_progress=False)
    foreign.train_from_iterator(make_texts(9), trainer)
    assert [*tokenizer.split_text(text, foreign)] == [text]


def test_external_tokenizer_requires_end_token_and_uses_its_special_tokens(tmp_path):
    vocabulary_size = save_foreign_tokenizer(tmp_path / 'other.json')
    source = write_source(tmp_path / 'a.jsonl', make_texts(9))
    recipe = make_recipe(source, tokenizer=str(tmp_path / 'other.json'), vocabulary=None)
    with pytest.raises(UserError, match=f'{vocabulary_size - 2} </s>'):
        prepare_store(recipe, tmp_path / 'store')
    recipe = dataclasses.replace(recipe, end_token=vocabulary_size - 2, fixed_token=vocabulary_size - 1)
    prepare_store(recipe, tmp_path / 'store')
    row = Store(tmp_path / 'store').get_tokens('train', '')
    assert (row.read_ids(0, len(row)) == vocabulary_size - 2).sum() == len(row.read_documents()[0])


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
