"""Prefetching in a thread: order, bounded lag, errors and shutdown."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.data.prefetch import prefetch


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 20), st.integers(1, 8), st.randoms())
def test_prefetch_keeps_order_and_bounded_lag(count, lag, random):
    inputs, outputs = [], []

    def compute_item(number):
        inputs.append(number)
        assert len(inputs) <= len(outputs) + lag + 1  # one item may be returned and not yet in `outputs`
        time.sleep(random.random() / 1000)
        return number * number

    with contextlib.closing(prefetch(compute_item, range(3, 3 + count), lag)) as items:
        for item in items:
            outputs.append(item)
    assert outputs == [number * number for number in range(3, 3 + count)]
    assert inputs == list(range(3, 3 + count))


def test_prefetch_raises_error_at_position_of_failed_item():
    def compute_item(number):
        if number == 1:
            raise OSError('of a disk')
        return number

    with contextlib.closing(prefetch(compute_item, range(3), 3)) as items:
        assert next(items) == 0
        with pytest.raises(OSError, match='of a disk'):
            next(items)
