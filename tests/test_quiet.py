"""What Orbax says beside what it raises is kept quiet, whatever threads do meanwhile, and nothing else is."""

import logging
import sys
import threading
import warnings

import pytest

from sinklab.checkpoint.orbax_compat import install_filters, suppress_orbax_logs


def process_wide():
    install_filters()  # which stays
    loggers = [logging.getLogger(name) for name in (None, 'absl', 'asyncio')]
    return [list(logger.filters) for logger in loggers], sys.unraisablehook, list(warnings.filters)


def passes(path):
    """Whether a record of a file reaches the handlers of absl's logger."""
    record = logging.LogRecord('absl', logging.ERROR, path, 1, 'said', (), None)
    return bool(logging.getLogger('absl').filter(record))


class Thread:
    """A thread that goes into `quiet` and comes out of it when it is told to."""

    def __init__(self):
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.stay)
        self.thread.start()
        self.inside.wait(10)

    def stay(self):
        with suppress_orbax_logs():
            self.inside.set()
            self.leave.wait(10)

    def end(self):
        self.leave.set()
        self.thread.join(10)


def test_of_two_threads_that_overlap_the_second_is_quiet_to_its_end_and_then_nothing_is_left():
    before = process_wide()
    first = Thread()
    second = Thread()
    first.end()
    assert not passes('/lib/orbax/checkpoint.py')
    assert passes('/lib/of/another.py')
    second.end()
    assert passes('/lib/orbax/checkpoint.py')
    assert process_wide() == before


def test_what_another_thread_sets_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)

    def hook(given):
        pass

    with warnings.catch_warnings():
        thread = Thread()
        sys.unraisablehook = hook
        warnings.filterwarnings('ignore', 'of another thread')
        thread.end()
        assert sys.unraisablehook is hook
        assert next(one[1].pattern for one in warnings.filters if one[1]) == 'of another thread'


@pytest.mark.slow
def test_an_error_inside_leaves_nothing_behind():
    before = process_wide()
    with pytest.raises(KeyError), suppress_orbax_logs():
        raise KeyError
    assert process_wide() == before
