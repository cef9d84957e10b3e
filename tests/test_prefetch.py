"""Prefetcher: order, bounded lag, errors and shutdown."""

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.train.prefetch import Prefetcher


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 20), st.integers(1, 8), st.randoms())
def test_prefetcher_keeps_order_and_bounded_lag(count, lag, random):
    inputs, outputs = [], []

    def compute_item(number):
        inputs.append(number)
        assert len(inputs) <= len(outputs) + lag + 1  # one item may be returned by `get` and not yet in `outputs`
        time.sleep(random.random() / 1000)
        return number * number

    prefetcher = Prefetcher(compute_item, range(3, 3 + count), lag)
    for _ in range(count):
        outputs.append(prefetcher.get())
    prefetcher.close()
    assert outputs == [number * number for number in range(3, 3 + count)]
    assert inputs == list(range(3, 3 + count))


def test_prefetcher_computes_next_items_before_get():
    event = threading.Event()
    prefetcher = Prefetcher(lambda number: event.set() if number == 3 else number, range(8), 4)
    assert event.wait(10)
    assert [prefetcher.get() for _ in range(3)] == [0, 1, 2]
    prefetcher.close()


def test_prefetcher_raises_error_at_position_of_failed_item():
    def compute_item(number):
        if number == 1:
            raise OSError('of a disk')
        return number

    prefetcher = Prefetcher(compute_item, range(3), 3)
    assert prefetcher.get() == 0
    with pytest.raises(OSError, match='of a disk'):
        prefetcher.get()
    assert prefetcher.get() == 2
    prefetcher.close()


HANGS = """
import time
from sinklab.train import prefetch
prefetch.CLOSE_SECONDS = 0.1
prefetch.Prefetcher(lambda _: time.sleep(600), range(3), 3).close()
"""


def test_prefetcher_close_lets_process_exit_despite_hanging_item():
    subprocess.run([sys.executable, '-c', HANGS], check=True, timeout=60)
