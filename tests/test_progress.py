"""Progress of runs and sweeps: records, and lines of a log."""

import io
import re
import sys

import pytest
from tiny_specs import make_tiny_spec

from sinklab.cli import progress
from sinklab.run_dir import RunDir
from sinklab.sweep.plan import SweepRun
from sinklab.sweep.run import run_sweep


def make_callback():
    return progress.ProgressCallback('mine', 8, descriptions=['a 1 -> 2'])


def test_log_shows_last_sink(capsys, monkeypatch):
    monkeypatch.setattr(progress, 'LOG_SECONDS', -1.0)
    callback = make_callback()
    for record in ({'step': 0, 'sink/1': 10.0}, *({'step': step, 'train/loss': 5.0} for step in (1, 2))):
        callback.on_record(record, written=True)
    callback.on_record({'step': 3, 'train/loss': 5.0, 'sink/1': 20.0}, written=True)
    lines = capsys.readouterr().err.splitlines()
    sinks = [line.partition('Sink_1 ')[2].partition('  ')[0] for line in lines]
    assert sinks == ['10.0 %'] * 3 + ['20.0 %']


@pytest.mark.parametrize('step', [0, 3])
def test_log_begins_with_row_and_attention(capsys, step):
    make_callback().on_train_begin(step, 'chunked', [])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ['mine  a 1 -> 2', 'mine  attention: chunked']
    assert lines[2:] == ([f'mine  resumes after step {step}'] if step else [])


@pytest.mark.parametrize('error', [BrokenPipeError(), OSError(28, 'No space left on device')], ids=repr)
def test_error_of_printing_is_suppressed(monkeypatch, error):
    class BrokenStream(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setattr(sys, 'stderr', BrokenStream())
    callback = make_callback()
    callback.on_train_begin(0, 'dense', [])
    callback.on_record({'step': 8, 'train/loss': 2.0}, written=True)
    callback.on_train_end()


# Program without JAX that prints as a run does.
CHILD_SCRIPT = """
import sys
from sinklab.cli.progress import ProgressCallback
callback = ProgressCallback(sys.argv[1], 8)
callback.on_train_begin(0, 'dense', [])
print('a warning', file=sys.stderr, flush=True)
print('a table')
callback.on_record({'step': 8, 'train/loss': 3.5, 'sink/1': 53.25, 'speed/tokens_per_second': 1234.0}, written=True)
"""


def test_output_into_pipe_is_plain_lines_that_name_their_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('FORCE_COLOR', '1')
    runs = [
        SweepRun(f'mine:{row}', 0, RunDir(tmp_path / row), None, make_tiny_spec()) for row in ('softmax', 'sigmoid')
    ]
    with progress.SweepDisplay(runs) as display:
        run_sweep(
            runs, lambda run: [sys.executable, '-c', CHILD_SCRIPT, run.run_dir.path.name], display, lambda: None
        )
    output = capsys.readouterr().err
    assert '\x1b' not in output
    first, second = re.split(r'^\[2/2\] mine:sigmoid, seed 0\n', output, flags=re.MULTILINE)
    heading, *lines = first.splitlines()
    assert heading == '[1/2] mine:softmax, seed 0'
    assert [line.removeprefix('mine:softmax, seed 0  ') for line in lines[:3]] == [
        'attention: dense',
        'a warning',
        'step 8/8  loss 3.500  1,234 tokens/s  Sink_1 53.2 %',
    ]
    assert re.fullmatch(r'mine:softmax, seed 0  done  \(all runs: 00:0\d left\)', lines[3])
    assert second.splitlines()[-1] == 'mine:sigmoid, seed 0  done'


def test_remaining_time_of_sweep_counts_steps_of_runs_that_are_done(capsys, tmp_path):
    runs = [SweepRun(row, 0, RunDir(tmp_path / row), None, make_tiny_spec()) for row in 'abcde']
    runs[0].outcome = 'done'  # before this sweep
    display = progress.SweepDisplay(runs)
    display.start_time -= 60
    for run, outcome in ((runs[1], 'refused'), (runs[2], 'done')):
        display.on_run_begin(run.row, run)
        run.outcome = outcome
        display.on_run_end(run)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == 'b, seed 0  refused'
    assert lines[3] == 'c, seed 0  done  (all runs: 02:00 left)'


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sweep_on_terminal_keeps_messages_and_replaces_steps(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'stderr', file := Terminal())
    monkeypatch.setenv('TERM', 'xterm')
    run = SweepRun('mine:k', 0, RunDir(tmp_path / 'k'), None, make_tiny_spec())
    with progress.SweepDisplay([run]) as display:
        display.on_run_begin('[1/1] mine:k, seed 0', run)
        for line in (b'k  step 1/8  loss 5.000\n', b'kept: a message\n', b'k  step 2/8  loss 4.000\n'):
            display.on_output_line(run, line)
        run.outcome = 'done'
        display.on_run_end(run)
    lines = re.sub(r'\x1b\[[\d?]*\w', '', file.getvalue()).replace('\r', '\n').splitlines()
    assert [line.strip() for line in lines].count('mine:k, seed 0  kept: a message') == 1
    assert 'mine:k, seed 0  step 2/8  loss 4.000' in [line.strip() for line in lines]
    assert lines[-1].strip() in ('', 'mine:k, seed 0  done')


def test_line_on_terminal_breaks_between_words(monkeypatch):
    monkeypatch.setenv('COLUMNS', '30')
    monkeypatch.setattr(sys, 'stderr', file := Terminal())
    words = ['model.attention.offset', '0', '->', '-1;', 'probe.every_steps', '1', '->', '20']
    make_callback().on_message(' '.join(words))
    assert max(map(len, file.getvalue().splitlines())) <= 30
    assert file.getvalue().split() == ['mine', *words]
