"""Batches: a pure function of seed and step."""

import dataclasses
import hashlib

import numpy as np
import pytest
from conftest import make_tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import BEGIN_TOKEN as FIXED_TOKEN
from stores import TokenArray, make_windows

from sinklab.data.windows import ShuffledBatches, Windows


def make_numbered_windows(count):
    return make_windows([TokenArray(np.arange(17 * count))])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 30),
    sizes=st.lists(st.integers(40, 900), min_size=1, max_size=3),
    share=st.sampled_from([1.0, 0.5, 0.1]),
    random_range=st.sampled_from([(None, None), (1, 1), (1, 2)]),
    fixed_position=st.sampled_from([None, 1]),
    masked=st.booleans(),
    weighted=st.booleans(),
    process_layout=st.sampled_from([(1, 4), (2, 3), (4, 2), (256, 1)]),
    seed=st.integers(0, 9),
    step=st.integers(0, 40),
)
def test_process_slices_match_sequential_reader(
    length, sizes, share, random_range, fixed_position, masked, weighted, process_layout, seed, step
):
    """Processes read with random access. One process reads in order with Grain's iterator."""
    processes, rows_per_process = process_layout
    rng = np.random.default_rng(seed)
    token_arrays = [TokenArray(rng.integers(2, 300, size), rng.random(size) < 0.5) for size in sizes]
    first, last = (None, None) if fixed_position else random_range
    data = dataclasses.replace(
        make_tiny_spec().data,
        seed=seed,
        random_first=first,
        random_last=last,
        fixed_position=fixed_position,
        length=length,
        loss='assistant' if masked else 'all',
    )
    sets = [[token_array] for token_array in token_arrays] if weighted else [token_arrays]
    weights = {str(number): 1 / len(token_arrays) for number in range(len(token_arrays))} if weighted else None

    def make_batches():
        labels = [f'train {number}' if weighted else 'train' for number in range(len(sets))]
        windows = [Windows(part, data, 300, label, share) for part, label in zip(sets, labels, strict=True)]
        return ShuffledBatches(windows, seed, rows_per_process * processes, weights)

    process_indices = sorted({0, processes // 2, processes - 1})
    slices = [
        make_batches().read_rows(step % 4, range(number * rows_per_process, (number + 1) * rows_per_process))
        for number in process_indices
    ]
    stream, windows = iter(make_batches().order.to_iter_dataset()), make_batches().windows
    window_indices = [next(stream) for _ in range((step % 4 + 1) * rows_per_process * processes)]
    batch = np.stack([windows[part][index] for part, index in window_indices[-rows_per_process * processes :]])
    for number, actual in zip(process_indices, slices, strict=True):
        assert actual.tobytes() == batch[number * rows_per_process : (number + 1) * rows_per_process].tobytes()
    ids = np.where(batch < 0, ~batch, batch)
    if fixed_position:
        assert (ids[:, 0] == FIXED_TOKEN).all()
    if not masked:
        assert (batch >= 0).all()


def test_epoch_shows_each_window_once_in_new_order():
    batches = ShuffledBatches([make_numbered_windows(24)], 0, 4)
    first_epoch, second_epoch = (
        np.concatenate([batches.read_rows(epoch * 6 + i, range(4))[:, 0] for i in range(6)]) for epoch in range(2)
    )
    assert sorted(first_epoch) == sorted(second_epoch) == [17 * i for i in range(24)]
    assert first_epoch.tolist() != second_epoch.tolist()
    assert first_epoch.tolist() != sorted(first_epoch)
    batches_of_other_seed = ShuffledBatches([make_numbered_windows(24)], 1, 4)
    assert batches.read_rows(0, range(4)).tolist() != batches_of_other_seed.read_rows(0, range(4)).tolist()


@pytest.mark.parametrize('weights', [None, dict(one=0.25, other=0.75)], ids=['one set', 'mixture'])
@pytest.mark.parametrize('processes', [1, 2, 8])
def test_order_digest_is_that_of_windows_that_processes_read(weights, processes):
    """The first token of each window is its number; windows of the second set begin with 1000."""
    batch_size = 8
    parts = [
        make_windows([TokenArray(np.repeat(np.arange(count) + first, 17))], share=0.5)
        for first, count in ((0, 40), (1000, 30))
    ]
    batches = ShuffledBatches(parts, 3, batch_size, weights)
    window_numbers = []
    for position in [*range(64), *(2**exponent for exponent in range(6, 33))]:
        step, row = divmod(position, batch_size)
        rows_per_process = batch_size // processes
        # The rows of the process that reads this row.
        rows = range(row // rows_per_process * rows_per_process, (row // rows_per_process + 1) * rows_per_process)
        window_numbers.append(divmod(int(batches.read_rows(step, rows)[rows.index(row), 0]), 1000))
    assert batches.compute_order_digest() == hashlib.sha256(repr(window_numbers).encode()).hexdigest()[:16]
    assert batches.compute_order_digest() == ShuffledBatches(parts, 3, 5, weights).compute_order_digest()
    assert batches.compute_order_digest() != ShuffledBatches(parts, 4, 8, weights).compute_order_digest()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(0, 3))
def test_mixture_batches_follow_weights_and_count_epochs(share, seed):
    parts = [make_windows([TokenArray(1000 * number + np.zeros(17 * 40, int))]) for number in range(2)]
    batches = ShuffledBatches(parts, seed, 20, dict(one=share, other=1 - share))
    actual = np.concatenate([batches.read_rows(step, range(20))[:, 0] for step in range(10)])
    assert abs((actual == 0).mean() - share) <= 2 / 200
    assert batches.count_epochs(10)['data/epoch/one'] == pytest.approx(200 * share / 40)
    assert batches.count_epochs(10)['data/epoch/other'] == pytest.approx(200 * (1 - share) / 40)
