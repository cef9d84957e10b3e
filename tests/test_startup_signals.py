"""Signals during startup: exit with one line and the code of the signal."""

import random
import signal
import subprocess
import sys
import time

import pytest
from faults.interrupts import interrupt

SINKLAB = [sys.executable, '-m', 'sinklab']
SCRIPT_PREAMBLE = """
import os, signal, sys, threading, time
from sinklab import startup_signals
sys.path.insert(0, {folder!r})

def send(seconds, number=signal.SIGINT):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

# Signals may be ignored here: SIGHUP by libtpu in another test, SIGINT in the background of a shell.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
startup_signals.install_signal_handlers('verb')
"""


def run_script(tmp_path, script: str) -> subprocess.CompletedProcess:
    """Run a Python script in which `send(seconds)` sends it a signal and the import of `slow` takes a second."""
    (tmp_path / 'slow.py').write_text('import time\nfor _ in range(50):\n    time.sleep(0.02)\n')
    script = SCRIPT_PREAMBLE.format(folder=str(tmp_path)) + script
    return subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, timeout=60)


def is_interpreter_interrupt(lines: tuple[str, ...]) -> bool:
    """Return whether Python was interrupted before the first line of the program."""
    return any('KeyboardInterrupt' in line for line in lines) and not any('/sinklab/' in line for line in lines)


def measure_fastest_time(command: list[str]) -> float:
    """Return the seconds of the fastest of three executions."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(
    ('signal_name', 'code'), [('SIGINT', 130), ('SIGTERM', -signal.SIGTERM), ('SIGHUP', -signal.SIGHUP)]
)
@pytest.mark.parametrize('statement', ['import slow', 'hash(b"x" * 2**30); time.sleep(20)'])
@pytest.mark.slow
def test_signal_during_startup_ends_process_with_one_line(tmp_path, signal_name, code, statement):
    result = run_script(tmp_path, f'send(0.1, signal.{signal_name})\n{statement}\nprint("went on")')
    assert (result.returncode, result.stdout) == (code, '')
    assert [signal_name in line for line in result.stderr.splitlines()] == [True]


@pytest.mark.slow
def test_ctrl_c_during_import_is_raised_afterwards(tmp_path):
    result = run_script(
        tmp_path,
        """
def work():
    import slow
    time.sleep(20)

try:
    with startup_signals.enable_keyboard_interrupts():
        send(0.1)
        work()
except KeyboardInterrupt:
    print('slow' in sys.modules, sys.gettrace())
""",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, 'True None\n', '')


def test_ctrl_c_swallowed_by_callback_is_raised_again(tmp_path):
    result = run_script(
        tmp_path,
        """
import weakref
class Thing: pass
try:
    with startup_signals.enable_keyboard_interrupts():
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing  # what a callback of a weak reference raises, Python prints and forgets
        time.sleep(20)
except KeyboardInterrupt:
    print('raised')
""",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, 'raised\n', '')


def test_ctrl_c_in_event_loop_leaves_no_message_of_asyncio(tmp_path):
    result = run_script(
        tmp_path,
        """
import asyncio, gc, logging
logging.basicConfig()

async def sleep():
    await asyncio.sleep(20)

def read():
    loop = asyncio.new_event_loop()
    unused = sleep()
    loop.call_later(0.1, signal.raise_signal, signal.SIGINT)
    loop.run_until_complete(sleep())

try:
    with startup_signals.enable_keyboard_interrupts():
        read()
except KeyboardInterrupt:
    pass
gc.collect()
print('raised')
""",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, 'raised\n', '')


def test_ctrl_c_is_raised_while_logging_is_imported_in_part(tmp_path):
    result = run_script(
        tmp_path,
        """
import types
sys.modules['logging'] = types.ModuleType('logging')
try:
    with startup_signals.enable_keyboard_interrupts():
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print('raised')
""",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, 'raised\n', '')


def test_error_that_replaces_keyboard_interrupt_counts_as_ctrl_c(tmp_path):
    result = run_script(
        tmp_path,
        """
from sinklab.cli import main, rows
def run(args, extra_args):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError('a checkpoint cannot be read')
rows.run = run
with startup_signals.enable_keyboard_interrupts():
    sys.exit(main.main(['rows']))
""",
    )
    assert (result.returncode, len(result.stderr.splitlines())) == (130, 1)


def test_ignored_signal_stays_ignored(tmp_path):
    script = "startup_signals.install_signal_handlers('verb')\nsignal.raise_signal(signal.SIGHUP)\nprint('went on')"
    result = run_script(
        tmp_path, script.replace('startup', 'signal.signal(signal.SIGHUP, signal.SIG_IGN); startup', 1)
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, 'went on\n', '')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('arguments', 'seconds', 'count'),
    [
        pytest.param(['--help'], None, 4, marks=pytest.mark.exhaustive),
        (['train', '--config=CONFIG', '--config.optimizer.steps=100000', '--workdir={}/run'], 3.0, 4),
        (['report', 'RUN'], 0.5, 4),
        pytest.param(['measure', 'RUN'], 3.0, 3, marks=pytest.mark.exhaustive),
        pytest.param(['--help'], None, 20, marks=pytest.mark.exhaustive),
        pytest.param(
            ['train', '--config=CONFIG', '--config.optimizer.steps=100000', '--workdir={}/run'],
            *(3.0, 20),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(['report', 'RUN'], 3.0, 20, marks=pytest.mark.exhaustive),
        pytest.param(['measure', 'RUN'], 3.0, 20, marks=pytest.mark.exhaustive),
    ],
)
def test_ctrl_c_at_random_startup_time_exits_with_130_and_one_line(config, finished_run, arguments, seconds, count):
    """A command that ends before the signal may exit with 0. The signal must interrupt at least one command.

    The signals are sent in the first `seconds`; None stands for the time that the command takes.
    """
    command = [part.replace('CONFIG', config).replace('RUN', str(finished_run[0])) for part in arguments]
    earliest = 0.03
    if seconds is None:
        seconds = measure_fastest_time([*SINKLAB, *command])
        earliest = 0.3 * seconds
    rng = random.Random(count)
    delays = [rng.uniform(earliest, seconds) for _ in range(count)]
    results = [interrupt([*SINKLAB, *command], delay, signal.SIGINT) for delay in delays]
    assert 130 in [result.exit_code for result in results], results
    for result in results:
        assert result.exit_code is not None, f'went on after {result.delay:.3f} s'
        if not is_interpreter_interrupt(result.lines):
            assert result.exit_code == 130 or (result.exit_code == 0 and arguments[0] != 'train'), result
            # Log lines of a run begin with its name and may follow a signal.
            message_lines = [line for line in result.lines if not line.startswith(f'{config}  ')]
            assert len(message_lines) <= (2 if 'after this step' in ''.join(result.lines) else 1), result
