"""Progress of runs and sweeps: records, lines of a log, and bars of a terminal."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_tiny_spec

from sinklab.cli import progress, terminal
from sinklab.cli.sweep import train_runs
from sinklab.run_dir import RunDir
from sinklab.sweep.plan import SweepRun

TESTS_FOLDER = Path(__file__).parent


def make_callback(**changes):
    display = progress.ProgressDisplay(terminal.make_console(stderr=True))
    return progress.ProgressCallback(display, 'mine', make_tiny_spec(**changes), row_description='a 1 -> 2')


def test_log_shows_last_sink_with_its_step(capsys, monkeypatch):
    monkeypatch.setattr(progress, 'LOG_SECONDS', -1.0)
    callback = make_callback()
    for record in ({'step': 0, 'sink/1': 10.0}, *({'step': step, 'train/loss': 5.0} for step in (1, 2))):
        callback.on_record(record, written=True)
    callback.on_record({'step': 3, 'train/loss': 5.0, 'sink/1': 20.0}, written=True)
    lines = capsys.readouterr().err.splitlines()
    sinks = [line.partition('Sink_1 ')[2].partition('  ')[0] for line in lines]
    assert sinks == ['10.0 %', *['10.0 % at step 0'] * 2, '20.0 %']


@pytest.mark.parametrize(
    ('every_steps', 'step', 'is_reported'),
    [(0, 0, True), (8, 0, True), (4, 0, False), (4, 3, False), (4, 4, True), (3, 4, False)],
)
def test_log_begins_with_row_and_reports_run_without_intermediate_checkpoints(capsys, every_steps, step, is_reported):
    make_callback(checkpoint__every_steps=every_steps).on_train_begin(step, 'chunked, earlier dense', [])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ['mine  a 1 -> 2', 'mine  attention: chunked, earlier dense']
    assert f'mine  resumes after step {step}' in lines or not step
    assert any('config.checkpoint.every_steps' in line for line in lines) == is_reported


@pytest.mark.parametrize('error', [BrokenPipeError(), OSError(28, 'No space left on device')], ids=repr)
def test_error_of_printing_is_suppressed(monkeypatch, error):
    class BrokenStream(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setattr(sys, 'stderr', BrokenStream())
    callback = make_callback()
    with callback.display:
        callback.on_train_begin(0, 'dense', [])
        callback.on_record({'step': 8, 'train/loss': 2.0}, written=True)


# Program without JAX that writes the files of a run and handles SIGINT as a run does.
CHILD_SCRIPT = """
import json, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
def write(**record):
    with (folder / 'metrics.jsonl').open('a') as file:
        print(json.dumps(record), file=file)
def stop(number, frame):
    time.sleep(0.5)
    print('sinklab train: saved at step 2; resume with: sinklab train', file=sys.stderr, flush=True)
    raise SystemExit(130)
signal.signal(signal.SIGINT, stop)
(folder / 'environment.json').write_text(json.dumps({'attempts': [{'step': 0, 'attention': 'dense'}]}))
write(**{'step': 0, 'sink/1': 0.0})
print('a warning', file=sys.stderr, flush=True)
print('words of a library')
if len(sys.argv) > 2:
    write(**{'step': 2, 'train/loss': 4.25, 'speed/tokens_per_second': 1234.0})
while len(sys.argv) > 2:
    time.sleep(0.05)
write(**{'step': 8, 'train/loss': 3.5, 'sink/1': 53.25, 'speed/tokens_per_second': 1234.0})
"""


def sweep(folder, *arguments):
    """Train two runs in processes of CHILD_SCRIPT with the display of a sweep."""
    runs = [SweepRun(name, 0, RunDir(f'{folder}/{name}'), None, make_tiny_spec()) for name in ('softmax', 'sigmoid')]

    def make_command(run):
        return [sys.executable, '-c', CHILD_SCRIPT, str(run.run_dir), *arguments]

    train_runs(runs, make_command, lambda: None, jobs=1)
    return runs


def run_in_terminal(code, keys=(), columns=80, term='xterm-256color', seconds=60):
    """Run code in a terminal and return (output, exit code); press each of `keys` after its text appears.

    Kill a program that runs for longer than `seconds`.
    """
    environment = {
        **os.environ,
        'TERM': term,
        'COLUMNS': str(columns),
        'PYTHONPATH': f'{TESTS_FOLDER}:{TESTS_FOLDER.parent}',
    }
    environment.pop('NO_COLOR', None)
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, '-c', code], environment)
    output, keys, deadline = b'', list(keys), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:
                break
            output += chunk
        if keys and keys[0][0] in output:
            os.write(terminal, keys.pop(0)[1])
    else:
        os.kill(pid, signal.SIGKILL)
    return output.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def render_screen(output):
    """Return the final lines of a terminal, after carriage returns, moves up and erased lines."""
    lines, row, column = [''], 0, 0
    for part in re.findall(r'\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+', output):
        if part == '\r':
            column = 0
        elif part == '\n':
            row += 1
            lines += [''] * (row + 1 - len(lines))
        elif part.startswith('\x1b'):
            if part.endswith('A'):
                row = max(0, row - int(part[2:-1] or 1))
            elif part == '\x1b[2K':
                lines[row] = ''
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


SWEEP_IMPORT_CODE = (
    'import sys\nfrom sinklab.sweep import run\nrun.prepare_stores '
    '= lambda runs: None\nfrom test_progress import sweep\n'
)


@pytest.mark.slow
def test_bars_are_erased_and_each_run_leaves_its_metrics_and_outcome(tmp_path):
    output, code = run_in_terminal(f'{SWEEP_IMPORT_CODE}sweep({str(tmp_path)!r})', columns=100)
    assert code == 0, output
    lines = ['seed 0', 'a warning', 'words of a library', 'step 8/8  loss 3.500', 'done']
    expected = [(row, line) for row in ('softmax', 'sigmoid') for line in lines]
    assert [
        (row in line, text in line) for (row, text), line in zip(expected, render_screen(output), strict=True)
    ] == [(True, True)] * len(expected)


@pytest.mark.slow
def test_ctrl_c_restores_terminal_and_cursor(tmp_path):
    code = (
        f'{SWEEP_IMPORT_CODE}runs = sweep({str(tmp_path)!r}, "wait")\nprint("ended", [run.outcome for run in runs])'
    )
    output, code = run_in_terminal(code, [(b'4.250', b'\x03')])
    assert code == 0, output
    *lines, last_line = render_screen(output)
    assert not any('━' in line for line in lines)
    assert last_line == "ended ['to do', 'to do']", 'what this test prints'


@pytest.mark.slow
@pytest.mark.parametrize('term', ['dumb', 'a pipe'])
def test_output_without_erasable_terminal_is_plain_lines(tmp_path, term):
    code = f'{SWEEP_IMPORT_CODE}sweep({str(tmp_path)!r})'
    if term == 'dumb':
        output = run_in_terminal(code, term=term)[0].replace('\r\n', '\n')
    else:
        environment = {**os.environ, 'FORCE_COLOR': '1', 'PYTHONPATH': f'{TESTS_FOLDER}:{TESTS_FOLDER.parent}'}
        output = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True).stderr
    assert '\x1b' not in output
    first, second = re.split(r'^\[2/2\] sigmoid, seed 0\n', output, flags=re.MULTILINE)
    heading, *lines = first.splitlines()
    assert re.fullmatch(r'\[1/2\] softmax, seed 0', heading)
    assert all(line.startswith('softmax, seed 0') for line in lines), 'each line names its run'
    assert all(line.startswith('sigmoid, seed 0') for line in second.splitlines()[: len(lines)])
    contents = ['a warning', 'words of a library', 'step 8/8', 'done']
    assert [sum(content in line for line in lines) for content in contents] == [1] * 4
    (line,) = (line for line in lines if 'step 8/8' in line)
    assert re.findall(r'[\d.,]+', line.partition('step ')[2]) == ['8', '8', '3.500', '1,234', '1', '53.2']
