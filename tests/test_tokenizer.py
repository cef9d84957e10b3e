"""Tests of trained and external tokenizers, and of long documents and words."""

import base64
import dataclasses
import random

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
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

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


CHARS = ["'s", "'re", '  ', *"' \n\taÉ中1²_-\u0301\u2028\x1c🙂"]


def make_wordless_texts(size):
    """Make texts of about `size` characters without word ends, or with few of them, by name."""
    rng = random.Random(0)
    return dict(
        line_breaks='\n' * size + 'ordinary text',
        letters=''.join(rng.choices('abcdÉ中', k=size)),
        digits='1²3' * (size // 3),
        hexadecimal=rng.randbytes(size // 2).hex(),
        base64=base64.b64encode(rng.randbytes(size * 3 // 4)).decode(),
        marks='-_' * (size // 2),
        runs=''.join(char * rng.randint(1, size // 50) for char in rng.choices(CHARS, k=60)),
    )


def train_tokenizer(texts):
    return tokenizer.parse_tokenizer(tokenizer.train_tokenizer(texts, 300), 'trained')


def get_pre_tokens(trained, text):
    return [text[start:end] for _, (start, end) in trained.pre_tokenizer.pre_tokenize_str(text)]


def test_training_cuts_words_that_are_too_long():
    texts = make_wordless_texts(300_000)
    trained = train_tokenizer([*texts.values()])
    for text in texts.values():
        pre_tokens = get_pre_tokens(trained, text)
        assert ''.join(pre_tokens) == text
        assert max(map(len, pre_tokens)) <= 1 + tokenizer.MAX_WORD_CHARS  # 1: the space before a word
        assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


def test_cut_of_long_words_does_not_change_other_text():
    rng = random.Random(0)
    texts = [''.join(rng.choices(CHARS, k=400)) for _ in range(200)]
    plain, cut = train_tokenizer(texts), train_tokenizer(['a' * 1000])
    assert plain.pre_tokenizer.__getstate__() == pre_tokenizers.ByteLevel(add_prefix_space=False).__getstate__()
    assert [get_pre_tokens(cut, text) for text in texts] == [get_pre_tokens(plain, text) for text in texts]
    plain_ids = [plain.encode(text).ids for text in texts]
    plain.pre_tokenizer = cut.pre_tokenizer
    assert [plain.encode(text).ids for text in texts] == plain_ids


@pytest.mark.parametrize('name', make_wordless_texts(1000))
def test_wordless_text_is_split_into_pieces_with_the_ids_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 4000)
    texts = make_wordless_texts(20_000)
    trained = train_tokenizer([*texts.values()])
    pieces = [*tokenizer.split_text(texts[name], trained)]
    assert ''.join(pieces) == texts[name]
    assert max(map(len, pieces)) <= tokenizer.MAX_ENCODED_CHARS
    expected_ids = trained.encode(texts[name]).ids
    assert tokenizer.encode_long_text(trained, texts[name]).tolist() == expected_ids


def test_tokenizer_that_adds_a_space_to_each_text_encodes_long_text_at_once(monkeypatch):
    monkeypatch.setattr(tokenizer, 'MAX_ENCODED_CHARS', 1000)
    text = ' '.join(make_texts(400))
    foreign = Tokenizer(models.BPE(unk_token='<unk>'))
    foreign.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=['<unk>'], show_progress=False)
    foreign.train_from_iterator(make_texts(9), trainer)
    assert [*tokenizer.split_text(text, foreign)] == [text]
    assert [*map(len, tokenizer.split_text('\n' * 2500, foreign))] == [1000, 1000, 500]  # no text with words


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
