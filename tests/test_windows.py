"""Windows, batches and token interventions."""

import dataclasses

import numpy as np
import pytest
from conftest import make_tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import BEGIN_TOKEN as FIXED_TOKEN
from stores import END_TOKEN, TokenArray, make_windows
from tiny_runs import RecordingCallback, train_run

from sinklab.data.prepare import open_corpus as open_store
from sinklab.data.run_data import load_run_data
from sinklab.data.windows import (
    PROBE_INPUTS,
    ShuffledBatches,
    make_natural_probe,
)
from sinklab.errors import UserError
from sinklab.train.step import find_document_starts


@pytest.fixture
def data(corpus):
    return dataclasses.replace(make_tiny_spec().data, source=corpus)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=5), st.integers(1, 30))
def test_windows_of_several_domains_are_concatenated(sizes, length):
    rows = [TokenArray(1000 * number + np.arange(size)) for number, size in enumerate(sizes)]
    if all(size <= length for size in sizes):
        with pytest.raises(UserError):
            make_windows(rows, length=length)
        return
    windows = make_windows(rows, length=length)
    actual = [windows[number].tolist() for number in windows.numbers]
    assert actual == [
        window
        for row in rows
        for window in row.tokens[: len(row) // (length + 1) * (length + 1)].reshape(-1, length + 1).tolist()
    ]


def test_windows_encode_masked_ids_as_bitwise_complement():
    ids, is_counted = np.arange(34), np.arange(34) % 3 == 0
    windows = make_windows([TokenArray(ids, is_counted)], loss='assistant')
    for index in range(2):
        window, token_slice = windows[index], slice(17 * index, 17 * index + 17)
        np.testing.assert_array_equal(window >= 0, is_counted[token_slice])
        np.testing.assert_array_equal(np.where(window < 0, ~window, window), ids[token_slice])


def test_natural_probe_takes_document_starts_then_next_tokens(data):
    store = open_store(data, 300)
    row = store.get_tokens('held_out', '')
    starts, keys = row.read_documents()
    documents = [row.read_ids(*span) for span in zip(starts, [*starts[1:], len(row)], strict=True)]
    documents = [documents[number] for number in np.argsort(keys)]
    count = len(documents)
    probe = dataclasses.replace(make_tiny_spec().probe, sequences=count + 2, length=10)
    sequences = make_natural_probe(store, probe, [])
    for number in range(count):
        np.testing.assert_array_equal(sequences[number], documents[number][:10])
    np.testing.assert_array_equal(sequences[count], documents[0][10:20])
    with pytest.raises(UserError, match=r'config\.probe\.sequences'):
        make_natural_probe(store, dataclasses.replace(probe, sequences=10_000), [])


@pytest.mark.parametrize('sequences', [1, 100])
def test_synthetic_probe_is_deterministic_and_shares_prefix_across_lengths(data, sequences):
    store = open_store(data, 300)
    for inputs in ('random', 'repeated'):
        short, long = (
            PROBE_INPUTS[inputs](
                store,
                dataclasses.replace(make_tiny_spec().probe, inputs=inputs, sequences=sequences, length=length),
                [],
            )
            for length in (12, 50)
        )
        np.testing.assert_array_equal(long[:, :12], short)
        assert short.shape == (sequences, 12)
        assert (short == short[:, :1]).all() == (inputs == 'repeated')
        with_bos = PROBE_INPUTS[inputs](store, dataclasses.replace(make_tiny_spec().probe, inputs=inputs), [7])
        assert (with_bos[:, 0] == 7).all()
    sampled = PROBE_INPUTS['random'](
        store, dataclasses.replace(make_tiny_spec().probe, sequences=128, length=2048), []
    )
    counts = np.bincount(sampled.ravel(), minlength=store.meta['vocabulary'])
    assert len(counts) == store.meta['vocabulary']
    assert abs(counts / counts.mean() - 1).max() < 0.2


@pytest.mark.parametrize('position', [1, 3, 16])
def test_fixed_position_replaces_only_that_position(corpus, position):
    spec = make_tiny_spec(data__source=corpus, data__fixed_position=position, probe__length=16)
    plain, fixed = (load_run_data(s) for s in (make_tiny_spec(data__source=corpus, probe__length=16), spec))
    for fixed_array, plain_array in (
        (fixed.batches.read_rows(3, range(4)), plain.batches.read_rows(3, range(4))),
        (fixed.valid_NT, plain.valid_NT),
        (fixed.probe_PT, plain.probe_PT),
    ):
        assert (fixed_array[:, position - 1] == FIXED_TOKEN).all()
        np.testing.assert_array_equal(
            np.delete(fixed_array, position - 1, 1), np.delete(plain_array, position - 1, 1)
        )


def test_fixed_held_out_false_keeps_held_out_sequences(corpus):
    plain, spec = (make_tiny_spec(data__source=corpus, **changes) for changes in ({}, FIXED_IN_TRAINING))
    natural, changed = load_run_data(plain), load_run_data(spec)
    assert (changed.batches.read_rows(0, range(4))[:, 0] == FIXED_TOKEN).all()
    np.testing.assert_array_equal(changed.valid_NT, natural.valid_NT)
    np.testing.assert_array_equal(changed.probe_PT, natural.probe_PT)


FIXED_IN_TRAINING = dict(data__fixed_position=1, data__fixed_held_out=False)


@pytest.mark.parametrize(('first', 'last'), [(1, 1), (1, 2), (2, 2), (1, 10)])
def test_random_tokens_replace_only_given_positions(corpus, first, last):
    plain = load_run_data(make_tiny_spec(data__source=corpus))
    spec = make_tiny_spec(data__source=corpus, data__random_first=first, data__random_last=last)
    randomized, repeated = load_run_data(spec), load_run_data(spec)
    positions = slice(first - 1, last)
    for random_array, plain_array in (
        (randomized.batches.read_rows(3, range(4)), plain.batches.read_rows(3, range(4))),
        (randomized.valid_NT, plain.valid_NT),
    ):
        assert (random_array[:, positions] != plain_array[:, positions]).mean() > 0.7
        assert random_array[:, positions].max() > 200  # of 300 ids
        np.testing.assert_array_equal(np.delete(random_array, positions, 1), np.delete(plain_array, positions, 1))
    np.testing.assert_array_equal(randomized.probe_PT, plain.probe_PT)
    np.testing.assert_array_equal(randomized.batches.read_rows(3, range(4)), repeated.batches.read_rows(3, range(4)))
    reseeded = load_run_data(dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=1)))
    assert randomized.valid_NT[:, positions].tolist() != reseeded.valid_NT[:, positions].tolist()


def test_random_tokens_of_window_are_same_in_every_epoch():
    windows = make_windows([TokenArray(np.arange(17 * 8))], random_first=1, random_last=3)
    batches = ShuffledBatches([windows], 0, 8)
    first_rows, second_rows = (
        sorted(batches.read_rows(epoch, range(8)).tolist(), key=lambda row: row[-1]) for epoch in range(2)
    )
    assert first_rows == second_rows


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 1), st.integers(20, 400), st.integers(0, 3))
def test_windows_share_is_exact_disjoint_and_deterministic(share, count, seed):
    rows = [TokenArray(np.arange(17 * count))]
    windows = make_windows(rows, share=share, seed=seed)
    first_ids = [int(windows[number][0]) for number in windows.numbers]
    assert len(windows) == max(1, round(share * count))
    assert len(set(first_ids)) == len(first_ids)
    assert all(first_id % 17 == 0 for first_id in first_ids)
    assert list(windows.numbers) == list(make_windows(rows, share=share, seed=seed).numbers)


def test_bos_documents_only_inserts_bos_tokens(data):
    plain_corpus, bos_corpus = open_store(data, 300), open_store(dataclasses.replace(data, bos='documents'), 300)
    bos_tokens, plain_tokens = (store.get_tokens('held_out', '') for store in (bos_corpus, plain_corpus))
    starts, _ = bos_tokens.read_documents()
    np.testing.assert_array_equal(
        np.delete(bos_tokens.read_ids(0, len(bos_tokens)), starts), plain_tokens.read_ids(0, len(plain_tokens))
    )
    assert (bos_tokens.read_ids(0, len(bos_tokens))[starts] == FIXED_TOKEN).all()
    np.testing.assert_array_equal(
        make_natural_probe(bos_corpus, make_tiny_spec().probe, []),
        make_natural_probe(plain_corpus, make_tiny_spec().probe, []),
    )


@pytest.mark.parametrize(('prepend', 'token'), [('bos', FIXED_TOKEN), ('eos', END_TOKEN)])
def test_probe_prepend_inserts_token_before_text(corpus, prepend, token):
    plain = load_run_data(make_tiny_spec(data__source=corpus)).probe_PT
    prepended = load_run_data(make_tiny_spec(data__source=corpus, probe__prepend=prepend)).probe_PT
    assert (prepended[:, 0] == token).all()
    np.testing.assert_array_equal(prepended[:5, 1:], plain[:5, :-1])


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=1, max_size=3))
def test_find_document_starts_matches_loop_reference(rows):
    expected = np.zeros((len(rows), 12), int)
    for number, row in enumerate(rows):
        for position in range(1, 12):
            expected[number, position] = (
                position if row[position - 1] == END_TOKEN else expected[number, position - 1]
            )
    np.testing.assert_array_equal(find_document_starts(np.array(rows), END_TOKEN), expected)


def test_interventions_keep_loss_mask():
    is_counted = np.arange(34) % 2 == 0
    for changes in (dict(random_first=1, random_last=4), dict(fixed_position=2)):
        windows = make_windows([TokenArray(np.arange(34), is_counted)], loss='assistant', **changes)
        for number in range(2):
            np.testing.assert_array_equal(windows[number] >= 0, is_counted[17 * number : 17 * number + 17])


@pytest.mark.slow
def test_training_reports_token_count_of_data_share(corpus, tmp_path):
    spec = make_tiny_spec(data__source=corpus, data__share=0.1, optimizer__steps=3)
    store, callback = open_store(spec.data, 300), RecordingCallback()
    windows = len(store.get_tokens('train', '')) // 17
    train_run(spec, tmp_path / 'run', callback)
    num_used, num_total = 17 * round(windows / 10), 17 * windows
    line = f'data.share 0.1 is {num_used:,} of {num_total:,} training tokens; in the paper, of 5,000,000,000'
    assert callback.messages == [line]
    assert load_run_data(make_tiny_spec(data__source=corpus)).messages == ()


def test_random_tokens_differ_between_domains_and_ignore_share():
    rows = [TokenArray(np.zeros(17 * 50, int))]

    def draw_windows(share, domain):
        windows = make_windows(rows, label=f'train {domain}', share=share, random_first=1, random_last=8)
        return {number: windows[number].tolist() for number in windows.numbers}

    all_windows, half_share, other_domain = draw_windows(1.0, 'a'), draw_windows(0.5, 'a'), draw_windows(1.0, 'b')
    assert all(all_windows[number] == ids for number, ids in half_share.items())
    assert all(all_windows[number] != other_domain[number] for number in all_windows)
