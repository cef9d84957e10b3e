import dataclasses
import json

import numpy as np
import pytest
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sinklab.data.batches import Shuffled, sequences
from sinklab.data.documents import Document, read, split
from sinklab.data.interventions import Intervened, fixed
from sinklab.data.structure import starts
from sinklab.data.tokens import BEGIN, END_OF_TEXT, FIXED_TOKEN, cache, tokens
from sinklab.data.windows import Windows, first_tokens
from sinklab.record import Refusal


@pytest.fixture
def data(corpus):
    return dataclasses.replace(tiny().data, source=corpus)


def test_the_standard_library_is_a_corpus_of_its_sources_without_its_tests():
    documents = read('stdlib')
    names = [document.name for document in documents]
    assert 'json/decoder.py' in names
    assert 'unittest/case.py' in names
    assert not any(part in ('test', 'tests') for name in names for part in name.split('/'))
    assert len(documents) > 300
    assert names == sorted(names)


def test_text_files_and_json_lines_are_documents(tmp_path):
    (tmp_path / 'a.txt').write_text('first\nfile', encoding='utf-8')
    (tmp_path / 'b.jsonl').write_text(
        '{"text": "one", "id": 1}\n{"text": "zwei ü"}\n{"text": " "}\n', encoding='utf-8'
    )
    documents = read(f'text:{tmp_path}/*')
    assert [document.text for document in documents] == ['first\nfile', 'one', 'zwei ü']


@pytest.mark.parametrize(
    ('name', 'content', 'words'),
    [
        ('a.txt', b'caf\xe9', 'is not UTF-8 (byte 3)'),
        ('a.jsonl', b'{"text": "x"}\n{"body": "y"}\n', 'line 2, is not an object with a "text" in UTF-8'),
        ('a.jsonl', b'{"text": 3}\n', 'line 1, is not an object with a "text"'),
        ('a.jsonl', b'{"text": "x"', 'line 1'),
        ('a.jsonl', b'{"text": "x"}\n{"text": "caf\xe9"}\n', 'line 2, is not'),
        ('a.jsonl', b'{"text": "\\ud800"}\n', 'line 1, is not'),
        ('a.txt', b' \n', 'holds no text'),
        ('a.pdf', b'%PDF', 'cannot be read as text; allowed: .txt, .jsonl'),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal) as refusal:
        read(f'text:{tmp_path}/*')
    assert words in str(refusal.value)


@pytest.mark.parametrize('source', ['text:/nowhere/*.txt', 'txt:a', 'stdlb'])
def test_a_source_that_is_not_there_is_refused(source):
    with pytest.raises(Refusal):
        read(source)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_a_split_has_two_sides_and_every_document_is_on_one(names, held_out):
    documents = [Document(name, 'x') for name in sorted(names)]
    train, held = split(documents, held_out)
    assert train
    assert held
    assert sorted(train + held, key=lambda document: document.name) == documents
    assert split(documents[::-1], held_out) == (train, held)


def test_one_document_cannot_be_split():
    with pytest.raises(Refusal, match='split it into several files'):
        split([Document('a', 'x')], 0.1)


def test_tokens_decode_to_the_documents_each_closed_by_an_end(data):
    found = tokens(data, 300)
    tokenizer = Tokenizer.from_file(str(cache() / found.digest / 'tokenizer.json'))
    train, held_out = split(read(data.source), data.held_out)
    for ids, documents in ((found.train, train), (found.held_out, held_out)):
        cuts = np.flatnonzero(ids == END_OF_TEXT)
        rows = np.split(ids, cuts + 1)[:-1]
        assert [tokenizer.decode(row[:-1].tolist()) for row in rows] == [document.text for document in documents]
    assert found.held_out_starts.tolist() == [0, *(np.flatnonzero(found.held_out == END_OF_TEXT) + 1)]
    assert tokenizer.token_to_id('<|padding|>') == FIXED_TOKEN


def test_tokens_are_made_once_and_anew_when_the_content_changes(data, tmp_path, capsys):
    for name in ('a', 'b', 'c'):
        (tmp_path / f'{name}.txt').write_text(f'{name} text', encoding='utf-8')
    data = dataclasses.replace(data, source=f'text:{tmp_path}/*.txt')
    first = tokens(data, 300).digest
    assert 'tokenizing 3 documents' in capsys.readouterr().err
    assert tokens(data, 300).digest == first
    assert capsys.readouterr().err == ''
    (tmp_path / 'b.txt').write_text('another text', encoding='utf-8')
    assert tokens(data, 300).digest != first
    assert len({first, tokens(data, 290).digest, tokens(dataclasses.replace(data, held_out=0.5), 300).digest}) == 3


def test_a_given_tokenizer_is_used_and_one_with_too_many_ids_is_refused(data, tmp_path):
    path = cache() / tokens(data, 300).digest / 'tokenizer.json'
    given_one = dataclasses.replace(data, tokenizer=str(path))
    np.testing.assert_array_equal(tokens(given_one, 300).train, tokens(data, 300).train)
    with pytest.raises(Refusal, match=r'config\.model\.vocabulary is 260, but the tokenizer gives ids up to'):
        tokens(given_one, 260)
    with pytest.raises(Refusal, match='is no file; give a tokenizer'):
        tokens(dataclasses.replace(data, tokenizer='none.json'), 300)
    (tmp_path / 'broken.json').write_text('{"model": 3}')
    with pytest.raises(Refusal, match=r'broken\.json is no tokenizer'):
        tokens(dataclasses.replace(data, tokenizer=str(tmp_path / 'broken.json')), 300)


def test_a_cache_that_cannot_be_written_is_refused_and_left_as_it_was(data, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('in the way')
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'file'))
    with pytest.raises(Refusal, match='set SINKLAB_CACHE'):
        tokens(data, 300)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(31, 200))
def test_windows_are_disjoint_blocks_of_one_more_than_the_length(length, size):
    windows = Windows(np.arange(size, dtype=np.uint16), length, 'training')
    joined = np.concatenate([windows[index] for index in range(len(windows))])
    np.testing.assert_array_equal(joined, np.arange(len(windows) * (length + 1)))
    assert 0 <= size - len(joined) <= length
    assert joined.dtype == np.int32


def test_too_few_tokens_for_a_window_are_refused():
    with pytest.raises(Refusal, match='has 16 tokens and a window takes 17'):
        Windows(np.zeros(16), 16, 'held-out')


def test_probe_sequences_are_the_starts_of_held_out_documents_then_their_next_tokens(data):
    found = tokens(data, 300)
    documents = np.split(found.held_out, found.held_out_starts[1:-1])
    count = len(documents)
    sequences = first_tokens(found, count + 2, 10)
    for number in range(count):
        np.testing.assert_array_equal(sequences[number], documents[number][:10])
    np.testing.assert_array_equal(sequences[count], documents[0][10:20])
    with pytest.raises(Refusal, match=r'lower config\.probe\.sequences'):
        first_tokens(found, 10_000, 10)


@pytest.mark.parametrize('position', [1, 3, 16])
def test_a_fixed_position_holds_the_fixed_token_everywhere_and_nothing_else_moves(corpus, position):
    spec = tiny(data__source=corpus, data__fixed_position=position, probe__length=16)
    plain, fixed = (sequences(s) for s in (tiny(data__source=corpus, probe__length=16), spec))
    for ours, theirs in (
        (fixed.batches[3], plain.batches[3]),
        (fixed.valid_NT, plain.valid_NT),
        (fixed.probe_PT, plain.probe_PT),
    ):
        assert (ours[:, position - 1] == FIXED_TOKEN).all()
        np.testing.assert_array_equal(np.delete(ours, position - 1, 1), np.delete(theirs, position - 1, 1))


def test_an_intervention_leaves_its_input_alone(data):
    ids = np.full((2, 17), 7)
    fixed(ids, dataclasses.replace(data, fixed_position=2))
    assert (ids == 7).all()


def test_held_out_sequences_may_be_left_as_they_are(corpus):
    plain, spec = (tiny(data__source=corpus, **more) for more in ({}, FIXED_IN_TRAINING))
    natural, found = sequences(plain), sequences(spec)
    assert (found.batches[0][:, 0] == FIXED_TOKEN).all()
    np.testing.assert_array_equal(found.valid_NT, natural.valid_NT)
    np.testing.assert_array_equal(found.probe_PT, natural.probe_PT)


FIXED_IN_TRAINING = dict(data__fixed_position=1, data__fixed_held_out=False)


@pytest.mark.parametrize(('first', 'last'), [(1, 1), (1, 2), (2, 2), (1, 10)])
def test_random_tokens_stand_where_they_are_asked_for_the_same_in_every_epoch(corpus, first, last):
    plain = sequences(tiny(data__source=corpus))
    spec = tiny(data__source=corpus, data__random_first=first, data__random_last=last)
    found, again = sequences(spec), sequences(spec)
    places = slice(first - 1, last)
    for ours, theirs in ((found.batches[3], plain.batches[3]), (found.valid_NT, plain.valid_NT)):
        assert (ours[:, places] != theirs[:, places]).mean() > 0.7
        assert ours[:, places].max() > 200  # of 300 ids
        np.testing.assert_array_equal(np.delete(ours, places, 1), np.delete(theirs, places, 1))
    np.testing.assert_array_equal(found.probe_PT, plain.probe_PT)
    np.testing.assert_array_equal(found.batches[3], again.batches[3])
    other = sequences(dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=1)))
    assert found.valid_NT[:, places].tolist() != other.valid_NT[:, places].tolist()


def test_random_tokens_belong_to_a_window_and_not_to_a_step():
    windows = Windows(np.arange(17 * 8), 16, 'training')
    data = dataclasses.replace(tiny().data, random_first=1, random_last=3)
    batches = Shuffled(Intervened(windows, data, 300, fix=True), 0, 8)
    one, other = (sorted(batches[epoch].tolist(), key=lambda row: row[-1]) for epoch in range(2))
    assert one == other


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 1), st.integers(20, 400), st.integers(0, 3))
def test_a_share_of_the_windows_is_exact_disjoint_and_drawn_by_the_seed(share, count, seed):
    ids = np.arange(17 * count)
    windows = Windows(ids, 16, 'training', share, seed)
    firsts = [int(windows[index][0]) for index in range(len(windows))]
    assert len(windows) == max(1, round(share * count))
    assert len(set(firsts)) == len(firsts)
    assert all(first % 17 == 0 for first in firsts)
    assert firsts == [int(Windows(ids, 16, 'training', share, seed)[index][0]) for index in range(len(windows))]


def test_documents_are_opened_where_that_is_asked(data):
    plain, found = tokens(data, 300), tokens(dataclasses.replace(data, bos='documents'), 300)
    documents = np.split(found.held_out, found.held_out_starts[1:-1])
    expected = np.split(plain.held_out, plain.held_out_starts[1:-1])
    for ours, theirs in zip(documents, expected, strict=True):
        np.testing.assert_array_equal(ours, [BEGIN, *theirs])
    np.testing.assert_array_equal(first_tokens(found, 3, 10), first_tokens(plain, 3, 10))


@pytest.mark.parametrize(('prepend', 'token'), [('bos', BEGIN), ('eos', END_OF_TEXT)])
def test_a_probe_may_have_a_token_before_its_text(corpus, prepend, token):
    plain = sequences(tiny(data__source=corpus)).probe_PT
    found = sequences(tiny(data__source=corpus, probe__prepend=prepend)).probe_PT
    assert (found[:, 0] == token).all()
    np.testing.assert_array_equal(found[:5, 1:], plain[:5, :-1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=1, max_size=3))
def test_a_document_starts_after_the_end_of_the_one_before(rows):
    expected = np.zeros((len(rows), 12), int)
    for number, row in enumerate(rows):
        for place in range(1, 12):
            expected[number, place] = place if row[place - 1] == END_OF_TEXT else expected[number, place - 1]
    np.testing.assert_array_equal(starts(np.array(rows)), expected)


def plain_windows(count):
    return Intervened(Windows(np.arange(17 * count), 16, 'training'), tiny().data, 300, fix=True)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 40))
def test_a_batch_is_a_pure_function_of_seed_and_step(batch_size, seed, step):
    windows = plain_windows(23)
    one, other = (Shuffled(windows, seed, batch_size) for _ in range(2))
    for earlier in range(min(step, 3)):
        other[earlier]  # having read something before changes nothing
    np.testing.assert_array_equal(one[step], other[step])


def test_an_epoch_shows_every_window_once_and_the_next_one_in_another_order():
    windows = plain_windows(24)
    batches = Shuffled(windows, 0, 4)
    first, second = (np.concatenate([batches[epoch * 6 + i][:, 0] for i in range(6)]) for epoch in range(2))
    assert sorted(first) == sorted(second) == [17 * i for i in range(24)]
    assert first.tolist() != second.tolist()
    assert first.tolist() != sorted(first)
    other = Shuffled(windows, 1, 4)
    assert batches[0].tolist() != other[0].tolist()


def test_json_text_may_hold_any_character(tmp_path):
    text = 'line separators \u2028 \u0085 inside'
    (tmp_path / 'a.jsonl').write_text(json.dumps({'text': text}, ensure_ascii=False) + '\n', encoding='utf-8')
    assert [document.text for document in read(f'text:{tmp_path}/a.jsonl')] == [text]
