"""Tests of the suppression of Orbax logs in several threads."""

import logging
import sys
import threading
import warnings

import pytest

from sinklab.checkpoint.orbax_compat import install_filters, suppress_orbax_logs


def process_wide():
    install_filters()  # the filters remain installed
    loggers = [logging.getLogger(name) for name in (None, 'absl', 'asyncio')]
    return [list(logger.filters) for logger in loggers], sys.unraisablehook, list(warnings.filters)


def passes(path):
    """Return whether a record of a file reaches the handlers of the absl logger."""
    record = logging.LogRecord('absl', logging.ERROR, path, 1, 'said', (), None)
    return bool(logging.getLogger('absl').filter(record))


class Thread:
    """A thread that enters `suppress_orbax_logs` and leaves it when `end` is called."""

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


def test_suppression_lasts_until_last_of_overlapping_threads_ends():
    before = process_wide()
    first = Thread()
    second = Thread()
    first.end()
    assert not passes('/lib/orbax/checkpoint.py')
    assert passes('/lib/of/another.py')
    second.end()
    assert passes('/lib/orbax/checkpoint.py')
    assert process_wide() == before


def test_suppression_keeps_hooks_and_filters_set_meanwhile(monkeypatch):
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
def test_suppression_is_removed_after_error():
    before = process_wide()
    with pytest.raises(KeyError), suppress_orbax_logs():
        raise KeyError
    assert process_wide() == before
