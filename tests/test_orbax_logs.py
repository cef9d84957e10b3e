"""Tests of the filters for log records and unraisable errors of Orbax."""

import asyncio
import contextlib
import itertools
import logging
import subprocess
import sys
import types

import pytest
from tiny_runs import make_spec, train_run

from sinklab.checkpoint import orbax_compat
from sinklab.errors import UserError
from sinklab.train.callbacks import Callback

ORBAX_FILE = '/lib/orbax/checkpoint/file.py'


def passes_filter(name, path, error=None):
    """Return whether a record of a file reaches the handlers of a logger."""
    orbax_compat.install_log_filters()
    exc_info = error and (type(error), error, error.__traceback__)
    return bool(
        logging.getLogger(name).filter(logging.LogRecord(name, logging.ERROR, path, 1, '%d', ('x',), exc_info))
    )


def raise_in(path, error):
    """Return an error that was raised in a file."""
    with pytest.raises(type(error)) as raised:
        exec(compile('raise error', path, 'exec'), dict(error=error))
    return raised.value.with_traceback(raised.value.__traceback__.tb_next)


DISK_FULL_ERRORS = (
    OSError(28, 'No space left on device'),
    ValueError('RESOURCE_EXHAUSTED: Failed writing: No space left'),
)


@pytest.mark.parametrize('error', [None, *DISK_FULL_ERRORS], ids=lambda error: type(error).__name__)
def test_filter_drops_records_of_orbax_about_storage_errors(error):
    assert not passes_filter('absl', ORBAX_FILE, error)
    assert passes_filter('absl', '/lib/of/another.py', error)


def test_filter_keeps_other_errors_of_orbax():
    assert passes_filter('absl', ORBAX_FILE, TypeError('a bug'))


def test_filter_drops_errors_of_abandoned_tasks():
    error = ValueError('DATA_LOSS: Error reading [tensorstore_spec=]')
    assert not passes_filter('asyncio', asyncio.__file__, error)
    assert not passes_filter('asyncio', asyncio.__file__, raise_in(asyncio.tasks.__file__, error))
    assert not passes_filter('asyncio', asyncio.__file__, raise_in(ORBAX_FILE, KeyError()))
    assert passes_filter('asyncio', asyncio.__file__, raise_in('/lib/of/another.py', error))
    assert passes_filter('asyncio', asyncio.__file__, ValueError('DATA_LOSS'))


@pytest.mark.parametrize('name', ['absl', 'asyncio', 'orbax', None], ids=str)
def test_filter_keeps_records_of_other_code(caplog, name):
    orbax_compat.install_log_filters()
    logger = logging.getLogger(name)
    try:
        raise OSError(28, 'No space left on device')
    except OSError:
        logger.exception('Task exception was never retrieved')
    logger.error('a message')
    assert [record.getMessage() for record in caplog.records] == ['Task exception was never retrieved', 'a message']


def test_filter_keeps_class_of_absl_logger():
    """Test that getLogger does not create the logger before absl does."""
    script = 'from sinklab.checkpoint import orbax_compat; orbax_compat.install_log_filters()\n'
    script += 'import absl.logging, logging; assert type(logging.getLogger("absl")) is absl.logging.ABSLLogger'
    subprocess.run([sys.executable, '-c', script], check=True)


def test_filter_is_installed_once():
    orbax_compat.install_log_filters()
    hook = sys.unraisablehook
    orbax_compat.install_log_filters()
    assert logging.getLogger('absl').filters.count(orbax_compat.should_log) == 1
    assert sys.unraisablehook is hook


@pytest.fixture
def passed_errors(monkeypatch):
    """Return the list of unraisable errors that pass the filter."""
    errors = []
    monkeypatch.setattr(sys, 'unraisablehook', errors.append)
    orbax_compat.install_log_filters()
    return errors


def make_unraisable(origin):
    """Make the argument of the hook for a call to a closed event loop, from C++ or from a program."""
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match='Event loop is closed') as raised:
        loop.call_soon_threadsafe(print)
    error_class = ValueError if origin == 'another kind' else RuntimeError
    full_trace = raised.value.__traceback__
    trace = {'a program': full_trace, 'no trace': None}.get(origin, full_trace.tb_next)
    error = error_class('Event loop is closed').with_traceback(trace)
    return types.SimpleNamespace(
        exc_type=error_class, exc_value=error, exc_traceback=trace, object=None, err_msg=None
    )


def test_hook_drops_late_callback_to_closed_event_loop(passed_errors):
    """Test a call of TensorStore from a thread that has no Python frames but those of asyncio."""
    sys.unraisablehook(make_unraisable('C++'))
    assert passed_errors == []


@pytest.mark.parametrize('origin', ['a program', 'another kind', 'no trace'])
def test_hook_passes_other_unraisable_errors(passed_errors, origin):
    error = make_unraisable(origin)
    sys.unraisablehook(error)
    assert passed_errors == [error]


def test_hook_never_calls_itself_in_any_order_of_installation(passed_errors):
    """Test all orders of installation. With the first order, an earlier version of the hook called itself."""
    error = make_unraisable('a program')

    def wrap_hook():
        inner_hook = sys.unraisablehook
        sys.unraisablehook = lambda error: inner_hook(error)

    def restore_hook(original_hook=sys.unraisablehook):
        sys.unraisablehook = original_hook

    for order in itertools.product([orbax_compat.install_log_filters, wrap_hook, restore_hook], repeat=4):
        restore_hook()
        for change_hook in order:
            change_hook()
        orbax_compat.install_log_filters()
        sys.unraisablehook(error)
        assert passed_errors == [error]
        sys.unraisablehook(make_unraisable('C++'))
        assert passed_errors == [error]
        passed_errors.clear()


@pytest.mark.parametrize('error', [Exception(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_hook_drops_errors_raised_in_orbax_except_keyboard_interrupt(passed_errors, error):
    raise_in(ORBAX_FILE, error)
    arguments = types.SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__)
    sys.unraisablehook(arguments)
    assert passed_errors == [arguments] * isinstance(error, KeyboardInterrupt)


@pytest.mark.slow
def test_full_disk_is_reported_without_orbax_logs(corpus, small_disk, caplog):
    class DiskFiller(Callback):
        def on_record(self, record, written):
            if record['step'] == 6:
                with contextlib.suppress(OSError), (small_disk / 'ballast').open('wb', buffering=0) as file:
                    while file.write(bytes(1024)):
                        pass

    with pytest.raises(UserError, match='disk'):
        train_run(make_spec(corpus, checkpoint__every_steps=1), small_disk / 'run', DiskFiller())
    assert [record.getMessage() for record in caplog.records] == []
