"""Prefetcher: order, bounded lag, errors and shutdown."""

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.train.loop import Prefetcher


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 20), st.integers(1, 8), st.randoms())
def test_prefetcher_keeps_order_and_bounded_lag(count, lag, random):
    begun, taken = [], []

    def made(number):
        begun.append(number)
        assert len(begun) <= len(taken) + lag + 1  # one item may be returned by `get` and not yet in `taken`
        time.sleep(random.random() / 1000)
        return number * number

    ahead = Prefetcher(made, range(3, 3 + count), lag)
    for _ in range(count):
        taken.append(ahead.get())
    ahead.close()
    assert taken == [number * number for number in range(3, 3 + count)]
    assert begun == list(range(3, 3 + count))


def test_prefetcher_computes_next_items_before_get():
    done = threading.Event()
    ahead = Prefetcher(lambda number: done.set() if number == 3 else number, range(8), 4)
    assert done.wait(10)
    assert [ahead.get() for _ in range(3)] == [0, 1, 2]
    ahead.close()


def test_prefetcher_raises_error_at_position_of_failed_item():
    def made(number):
        if number == 1:
            raise OSError('of a disk')
        return number

    ahead = Prefetcher(made, range(3), 3)
    assert ahead.get() == 0
    with pytest.raises(OSError, match='of a disk'):
        ahead.get()
    assert ahead.get() == 2
    ahead.close()


HANGS = """
import time
from sinklab.train import loop
loop.PREFETCH_CLOSE_SECONDS = 0.1
loop.Prefetcher(lambda _: time.sleep(600), range(3), 3).close()
"""


def test_prefetcher_close_lets_process_exit_despite_hanging_item():
    subprocess.run([sys.executable, '-c', HANGS], check=True, timeout=60)
