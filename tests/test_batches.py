"""Windows with interventions, batches as a pure function of seed and step, and the sequences of the probe."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import BEGIN_TOKEN as FIXED_TOKEN
from stores import END_TOKEN, TokenArray, make_sharded_store, make_windows
from tiny_specs import make_tiny_spec

from sinklab.data.batches import Windows, make_shuffled_batches
from sinklab.data.run_data import PROBE_INPUTS, load_run_data, make_natural_probe, open_corpus
from sinklab.errors import UserError
from sinklab.train.step import find_document_starts


@pytest.fixture
def data(corpus):
    return dataclasses.replace(make_tiny_spec().data, source=corpus)


def load(corpus, **changes):
    return load_run_data(make_tiny_spec(data__source=corpus, **changes))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=5), st.integers(1, 30))
def test_windows_are_the_whole_blocks_of_each_domain_in_turn(sizes, length):
    arrays = [TokenArray(1000 * number + np.arange(size)) for number, size in enumerate(sizes)]
    blocks = [
        array.tokens[start : start + length + 1].tolist()
        for array in arrays
        for start in range(0, len(array) - length, length + 1)
    ]
    if not blocks:
        with pytest.raises(UserError):
            make_windows(arrays, length=length)
        return
    windows = make_windows(arrays, length=length)
    assert [windows[number].tolist() for number in windows.numbers] == blocks


def test_windows_without_packing_are_the_beginnings_of_long_documents(tmp_path):
    store = make_sharded_store(tmp_path)
    arrays = [store.get_tokens('train', domain) for domain in store.domains]
    length, documents = 60, []
    for array in arrays:
        ids = array.read_ids(0, len(array))
        documents += np.split(ids, np.flatnonzero(ids == END_TOKEN) + 1)
    expected = [document[: length + 1] for document in documents if len(document) > length]
    assert 0 < len(expected) < len(documents)
    windows = make_windows(arrays, length=length, packing=False)
    np.testing.assert_array_equal([windows[number] for number in windows.numbers], expected)
    with pytest.raises(UserError):
        make_windows(arrays, length=10_000, packing=False)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 1), st.integers(20, 400), st.integers(0, 3))
def test_share_takes_distinct_windows_in_its_number(share, count, seed):
    arrays = [TokenArray(np.arange(17 * count))]
    windows = make_windows(arrays, share=share, seed=seed)
    assert len(windows) == len(set(windows.numbers)) == max(1, round(share * count))
    assert set(windows.numbers) <= set(range(count))
    assert list(windows.numbers) == list(make_windows(arrays, share=share, seed=seed).numbers)


@pytest.mark.parametrize('changes', [{}, dict(random_first=1, random_last=4), dict(fixed_position=2)])
def test_ids_outside_the_loss_are_complements_also_after_interventions(changes):
    ids, is_counted = np.arange(34), np.arange(34) % 3 == 0
    windows = make_windows([TokenArray(ids, is_counted)], loss='assistant', **changes)
    unmasked = make_windows([TokenArray(ids)], **changes)
    for number in range(2):
        np.testing.assert_array_equal(windows[number] >= 0, is_counted[17 * number : 17 * number + 17])
        np.testing.assert_array_equal(
            np.where(windows[number] < 0, ~windows[number], windows[number]), unmasked[number]
        )


@pytest.mark.parametrize('position', [1, 3, 16])
def test_fixed_position_replaces_only_that_position(corpus, position):
    plain = load(corpus, probe__length=16)
    fixed = load(corpus, probe__length=16, data__fixed_position=position)
    for fixed_array, plain_array in (
        (fixed.batches.read_rows(3, range(4)), plain.batches.read_rows(3, range(4))),
        (fixed.valid_NT, plain.valid_NT),
        (fixed.probe_PT, plain.probe_PT),
    ):
        expected = plain_array.copy()
        expected[:, position - 1] = FIXED_TOKEN
        np.testing.assert_array_equal(fixed_array, expected)


def test_fixed_held_out_false_keeps_held_out_sequences(corpus):
    plain, changed = load(corpus), load(corpus, data__fixed_position=1, data__fixed_held_out=False)
    assert (changed.batches.read_rows(0, range(4))[:, 0] == FIXED_TOKEN).all()
    np.testing.assert_array_equal(changed.valid_NT, plain.valid_NT)
    np.testing.assert_array_equal(changed.probe_PT, plain.probe_PT)


@pytest.mark.parametrize(('first', 'last'), [(1, 1), (2, 2), (1, 10)])
def test_random_tokens_replace_only_given_positions(corpus, first, last):
    changes = dict(data__random_first=first, data__random_last=last)
    plain, randomized, reseeded = load(corpus), load(corpus, **changes), load(corpus, data__seed=1, **changes)
    positions = slice(first - 1, last)
    for random_array, plain_array in (
        (randomized.batches.read_rows(3, range(4)), plain.batches.read_rows(3, range(4))),
        (randomized.valid_NT, plain.valid_NT),
    ):
        assert (random_array[:, positions] != plain_array[:, positions]).mean() > 0.7
        assert random_array[:, positions].max() > 200  # of 300 ids
        np.testing.assert_array_equal(np.delete(random_array, positions, 1), np.delete(plain_array, positions, 1))
    np.testing.assert_array_equal(randomized.probe_PT, plain.probe_PT)
    assert randomized.valid_NT[:, positions].tolist() != reseeded.valid_NT[:, positions].tolist()


def test_random_tokens_depend_on_window_and_domain_and_not_on_share_or_epoch():
    def draw_windows(share, domain):
        windows = make_windows(
            [TokenArray(np.zeros(17 * 50, int))], label=domain, share=share, random_first=1, random_last=8
        )
        return {number: windows[number].tolist() for number in windows.numbers}

    all_windows, half_share, other_domain = draw_windows(1.0, 'a'), draw_windows(0.5, 'a'), draw_windows(1.0, 'b')
    assert len({tuple(ids) for ids in all_windows.values()}) == 50
    assert all(all_windows[number] == ids for number, ids in half_share.items())
    assert all(all_windows[number] != other_domain[number] for number in all_windows)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 30),
    sizes=st.lists(st.integers(40, 900), min_size=1, max_size=3),
    share=st.sampled_from([1.0, 0.1]),
    changes=st.sampled_from(
        [{}, dict(random_first=1, random_last=2), dict(fixed_position=1), dict(loss='assistant')]
    ),
    weighted=st.booleans(),
    process_layout=st.sampled_from([(1, 4), (2, 3), (4, 2)]),
    seed=st.integers(0, 9),
    step=st.integers(0, 40),
)
def test_rows_of_processes_are_those_of_the_whole_batch(
    length, sizes, share, changes, weighted, process_layout, seed, step
):
    processes, rows_per_process = process_layout
    batch_size, rng = processes * rows_per_process, np.random.default_rng(seed)
    arrays = [TokenArray(rng.integers(2, 300, size), rng.random(size) < 0.5) for size in sizes]
    data = dataclasses.replace(make_tiny_spec().data, seed=seed, length=length, **changes)
    sets = [[array] for array in arrays] if weighted else [arrays]
    weights = {str(number): 1 / len(arrays) for number in range(len(arrays))} if weighted else None

    def make_batches():
        windows = [Windows(part, data, 300, f'train {number}', share) for number, part in enumerate(sets)]
        return make_shuffled_batches(windows, seed, batch_size, weights)

    whole_batch = make_batches().read_rows(step, range(batch_size))
    for process in {0, processes // 2, processes - 1}:
        rows = range(process * rows_per_process, (process + 1) * rows_per_process)
        np.testing.assert_array_equal(make_batches().read_rows(step, rows), whole_batch[rows.start : rows.stop])


def test_epoch_shows_each_window_once_in_new_order():
    def read_epoch(seed, epoch):
        batches = make_shuffled_batches([make_windows([TokenArray(np.arange(17 * 24))])], seed, 4)
        return np.concatenate([batches.read_rows(epoch * 6 + i, range(4))[:, 0] for i in range(6)]).tolist()

    orders = [read_epoch(0, 0), read_epoch(0, 1), read_epoch(1, 0)]
    assert [sorted(order) for order in orders] == [[17 * i for i in range(24)]] * 3
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize('weights', [None, dict(one=0.25, other=0.75)], ids=['one set', 'mixture'])
def test_order_digest_is_that_of_windows_that_are_read(weights):
    """The first token of each window is its number; windows of the second set begin with 1000."""
    parts = [
        make_windows([TokenArray(np.repeat(np.arange(count) + first, 17))], share=0.5)
        for first, count in ((0, 40), (1000, 30))
    ]
    batches, window_numbers = make_shuffled_batches(parts, 3, 8, weights), []
    for position in [*range(64), *(2**exponent for exponent in range(6, 33))]:
        step, row = divmod(position, 8)
        window_numbers.append(divmod(int(batches.read_rows(step, range(row, row + 1))[0, 0]), 1000))
    assert batches.order_digest == hashlib.sha256(repr(window_numbers).encode()).hexdigest()[:16]
    assert batches.order_digest == make_shuffled_batches(parts, 3, 5, weights).order_digest
    assert batches.order_digest != make_shuffled_batches(parts, 4, 8, weights).order_digest


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(0, 3))
def test_mixture_batches_follow_weights_and_count_epochs(share, seed):
    parts = [make_windows([TokenArray(1000 * number + np.zeros(17 * 40, int))]) for number in range(2)]
    batches = make_shuffled_batches(parts, seed, 20, dict(one=share, other=1 - share))
    actual = np.concatenate([batches.read_rows(step, range(20))[:, 0] for step in range(10)])
    assert abs((actual == 0).mean() - share) <= 2 / 200
    assert batches.count_epochs(10)['data/epoch/one'] == pytest.approx(200 * share / 40)
    assert batches.count_epochs(10)['data/epoch/other'] == pytest.approx(200 * (1 - share) / 40)


def test_natural_probe_takes_document_starts_then_next_tokens(data):
    store = open_corpus(data, 300)
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
    with pytest.raises(UserError):
        make_natural_probe(store, dataclasses.replace(probe, sequences=10_000), [])


@pytest.mark.parametrize('sequences', [1, 100])
def test_synthetic_probe_shares_prefix_across_lengths(data, sequences):
    store = open_corpus(data, 300)

    def make_probe(inputs, length, prefix_ids=(), sequences=sequences):
        probe = dataclasses.replace(make_tiny_spec().probe, inputs=inputs, sequences=sequences, length=length)
        return PROBE_INPUTS[inputs](store, probe, [*prefix_ids])

    for inputs in ('random', 'repeated'):
        short = make_probe(inputs, 12)
        assert short.shape == (sequences, 12)
        np.testing.assert_array_equal(make_probe(inputs, 50)[:, :12], short)
        assert (short == short[:, :1]).all() == (inputs == 'repeated')
        np.testing.assert_array_equal(make_probe(inputs, 12, [7]), np.insert(short[:, :-1], 0, 7, axis=1))
    counts = np.bincount(make_probe('random', 2048, sequences=128).ravel(), minlength=store.meta['vocabulary'])
    assert len(counts) == store.meta['vocabulary']
    assert abs(counts / counts.mean() - 1).max() < 0.2
    with pytest.raises(UserError):
        make_probe('random', 2049)


def test_bos_documents_only_inserts_bos_tokens(data):
    plain, bos = open_corpus(data, 300), open_corpus(dataclasses.replace(data, bos='documents'), 300)
    bos_tokens, plain_tokens = (store.get_tokens('held_out', '') for store in (bos, plain))
    starts, _ = bos_tokens.read_documents()
    bos_ids = bos_tokens.read_ids(0, len(bos_tokens))
    assert (bos_ids[starts] == FIXED_TOKEN).all()
    np.testing.assert_array_equal(np.delete(bos_ids, starts), plain_tokens.read_ids(0, len(plain_tokens)))
    probes = [make_natural_probe(store, make_tiny_spec().probe, []) for store in (bos, plain)]
    np.testing.assert_array_equal(*probes)


@pytest.mark.parametrize(('prepend', 'token'), [('bos', FIXED_TOKEN), ('eos', END_TOKEN)])
def test_probe_prepend_inserts_token_before_text(corpus, prepend, token):
    plain, prepended = load(corpus).probe_PT, load(corpus, probe__prepend=prepend).probe_PT
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
