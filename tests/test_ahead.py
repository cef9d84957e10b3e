"""Batches are made before they are asked for: in order, no further than is allowed, and none is lost."""

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
def test_all_come_in_their_order_and_none_is_begun_further_ahead_than_the_lag(count, lag, random):
    begun, taken = [], []

    def made(number):
        begun.append(number)
        assert len(begun) <= len(taken) + lag + 1  # one has been given room, and is on its way to `taken`
        time.sleep(random.random() / 1000)
        return number * number

    ahead = Prefetcher(made, range(3, 3 + count), lag)
    for _ in range(count):
        taken.append(ahead.get())
    ahead.close()
    assert taken == [number * number for number in range(3, 3 + count)]
    assert begun == list(range(3, 3 + count))


def test_what_is_wanted_next_is_made_while_nobody_asks():
    done = threading.Event()
    ahead = Prefetcher(lambda number: done.set() if number == 3 else number, range(8), 4)
    assert done.wait(10)
    assert [ahead.get() for _ in range(3)] == [0, 1, 2]
    ahead.close()


def test_an_error_is_raised_where_its_turn_is():
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


def test_a_process_ends_whatever_hangs_in_what_was_wanted():
    subprocess.run([sys.executable, '-c', HANGS], check=True, timeout=60)
