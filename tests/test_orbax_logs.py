"""What Orbax logs of a failed save: silent where the error is raised and said, loud where it is not."""

import asyncio
import contextlib
import itertools
import logging
import subprocess
import sys
import types

import pytest
from orbax.checkpoint._src.futures import future
from runs import spec, train

from sinklab import startup_signals
from sinklab.checkpoint import orbax_compat
from sinklab.schema import UserError
from sinklab.train.callbacks import Callback


def fail_in_a_thread(error):
    """The error, raised in one of Orbax's threads."""

    def fail():
        raise error

    started = future._SignalingThread(target=fail, send_signals=[], receive_signals=[])
    started.start()
    with pytest.raises(type(error)) as raised:
        started.join()
    assert raised.value is error, 'which is raised where the save is waited for'


FULL = OSError(28, 'No space left on device'), ValueError('RESOURCE_EXHAUSTED: Failed writing: No space left')


@pytest.mark.parametrize('error', FULL, ids=lambda error: type(error).__name__)
def test_an_error_of_storage_is_not_logged_beside_what_is_raised(caplog, error):
    orbax_compat.install_filters()
    fail_in_a_thread(error)
    assert caplog.records == []


def test_another_error_of_a_thread_is_logged(caplog):
    orbax_compat.install_filters()
    fail_in_a_thread(TypeError('a bug'))
    (record,) = caplog.records
    assert 'a bug' in record.getMessage()


@pytest.mark.parametrize('name', ['absl', 'asyncio', 'orbax', None], ids=str)
def test_what_others_log_is_left_as_it_is(caplog, name):
    orbax_compat.install_filters()
    logger = logging.getLogger(name)
    try:
        raise OSError(28, 'No space left on device')
    except OSError:
        logger.exception('Task exception was never retrieved')
    logger.error('a message')
    assert [record.getMessage() for record in caplog.records] == ['Task exception was never retrieved', 'a message']


def test_absl_keeps_a_logger_of_its_own_class():
    """It must not be made by getLogger before absl makes it."""
    script = 'from sinklab.checkpoint import orbax_compat; orbax_compat.install_filters()\n'
    script += 'import absl.logging, logging; assert type(logging.getLogger("absl")) is absl.logging.ABSLLogger'
    subprocess.run([sys.executable, '-c', script], check=True)


def test_the_filter_is_installed_once():
    for _ in range(2):
        orbax_compat.install_filters()
    assert logging.getLogger('absl').filters.count(orbax_compat.is_logged) == 1
    hook = sys.unraisablehook
    assert not isinstance(getattr(hook, 'hook', None), orbax_compat.UnraisableHook)


@pytest.fixture
def hooked(monkeypatch):
    """Errors that cannot be raised and reach the hook behind the filter."""
    heard = []
    monkeypatch.setattr(sys, 'unraisablehook', heard.append)
    orbax_compat.install_filters()
    return heard


def unraisable(of):
    """What the hook is given of a call to a closed event loop: from C++, by a program, or like one of these."""
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match='Event loop is closed') as raised:
        loop.call_soon_threadsafe(print)
    kind = ValueError if of == 'another kind' else RuntimeError
    whole = raised.value.__traceback__
    trace = {'a program': whole, 'no trace': None}.get(of, whole.tb_next)
    error = kind('Event loop is closed').with_traceback(trace)
    return types.SimpleNamespace(exc_type=kind, exc_value=error, exc_traceback=trace, object=None, err_msg=None)


def test_a_late_callback_to_a_closed_event_loop_is_silent(hooked):
    """TensorStore calls from a thread without frames of Python: those of asyncio are all that there are."""
    sys.unraisablehook(unraisable('C++'))
    assert hooked == []


@pytest.mark.parametrize('of', ['a program', 'another kind', 'no trace'])
def test_other_errors_that_cannot_be_raised_are_heard(hooked, of):
    given = unraisable(of)
    sys.unraisablehook(given)
    assert hooked == [given]


def test_hooks_that_others_set_and_put_back_meanwhile_are_called_and_never_in_a_circle(hooked):
    """The first of these orders once made a hook that called itself."""
    given = unraisable('a program')

    def wrap():
        inner = sys.unraisablehook
        sys.unraisablehook = lambda given: inner(given)

    def put_back(older=sys.unraisablehook):
        sys.unraisablehook = older

    stack = contextlib.ExitStack()
    changes = [
        lambda: stack.enter_context(orbax_compat.suppress_orbax_logs()),
        orbax_compat.install_filters,
        stack.close,
        wrap,
        put_back,
    ]
    for order in itertools.product(changes, repeat=4):
        put_back()
        for change in order:
            change()
        sys.unraisablehook(given)
        assert hooked == [given]
        sys.unraisablehook(unraisable('C++'))
        assert hooked == [given]
        hooked.clear()
        stack.close()


@pytest.mark.parametrize('inside', [False, True], ids=['before', 'inside'])
def test_keyboard_interrupts_and_the_filter_leave_each_other_in_force(hooked, monkeypatch, inside):
    monkeypatch.setattr(startup_signals.signal, 'getsignal', lambda number: startup_signals.exit_on_signal)
    monkeypatch.setattr(startup_signals.signal, 'signal', lambda number, handler: None)
    with startup_signals.enable_keyboard_interrupts():
        if inside:
            orbax_compat.install_filters()
        sys.unraisablehook(unraisable('C++'))
        sys.unraisablehook(unraisable('a program'))
        assert len(hooked) == 1
    with orbax_compat.suppress_orbax_logs():
        sys.unraisablehook(unraisable('C++'))
    assert len(hooked) == 1


def test_an_interrupt_in_code_of_orbax_is_heard_inside_of_quiet(hooked):
    code = compile('raise KeyboardInterrupt', '/lib/orbax/checkpoint.py', 'exec')
    with pytest.raises(KeyboardInterrupt) as raised:
        exec(code)
    trace = raised.value.__traceback__
    given = types.SimpleNamespace(exc_type=KeyboardInterrupt, exc_value=raised.value, exc_traceback=trace)
    with orbax_compat.suppress_orbax_logs():
        sys.unraisablehook(given)
    assert hooked == [given]


def test_a_message_that_cannot_be_formatted_does_not_raise_from_the_filter():
    orbax_compat.install_filters()
    with orbax_compat.suppress_orbax_logs():
        assert orbax_compat.is_logged(logging.LogRecord('absl', logging.ERROR, 'x.py', 1, '%d', ('x',), None))


@pytest.mark.slow
def test_a_full_disk_is_said_without_what_orbax_logs(corpus, small_disk, caplog):
    class Filler(Callback):
        def on_record(self, record, written):
            if record['step'] == 6:
                with contextlib.suppress(OSError), (small_disk / 'ballast').open('wb', buffering=0) as file:
                    while file.write(bytes(1024)):
                        pass

    with pytest.raises(UserError, match='no room is left'):
        train(spec(corpus, checkpoint__every_steps=1), small_disk / 'run', Filler())
    assert [record.getMessage() for record in caplog.records] == []
