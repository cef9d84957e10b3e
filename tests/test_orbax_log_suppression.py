"""Tests of the suppression of Orbax logs in several threads."""

import logging
import sys
import threading
import warnings

import pytest

from sinklab.checkpoint.orbax_compat import install_filters, suppress_orbax_logs


def get_process_state():
    install_filters()  # the filters remain installed
    loggers = [logging.getLogger(name) for name in (None, 'absl', 'asyncio')]
    return [list(logger.filters) for logger in loggers], sys.unraisablehook, list(warnings.filters)


def passes_filter(path):
    """Return whether a record of a file reaches the handlers of the absl logger."""
    record = logging.LogRecord('absl', logging.ERROR, path, 1, 'said', (), None)
    return bool(logging.getLogger('absl').filter(record))


class SuppressingThread:
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
    state_before = get_process_state()
    first = SuppressingThread()
    second = SuppressingThread()
    first.end()
    assert not passes_filter('/lib/orbax/checkpoint.py')
    assert passes_filter('/lib/of/another.py')
    second.end()
    assert passes_filter('/lib/orbax/checkpoint.py')
    assert get_process_state() == state_before


def test_suppression_keeps_hooks_and_filters_set_meanwhile(monkeypatch):
    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)

    def hook(arguments):
        pass

    with warnings.catch_warnings():
        thread = SuppressingThread()
        sys.unraisablehook = hook
        warnings.filterwarnings('ignore', 'of another thread')
        thread.end()
        assert sys.unraisablehook is hook
        assert (
            next(warning_filter[1].pattern for warning_filter in warnings.filters if warning_filter[1])
            == 'of another thread'
        )


@pytest.mark.slow
def test_suppression_is_removed_after_error():
    state_before = get_process_state()
    with pytest.raises(KeyError), suppress_orbax_logs():
        raise KeyError
    assert get_process_state() == state_before
