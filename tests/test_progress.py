"""Progress of runs and sweeps: records, and lines of a log."""

import io
import re
import sys

import pytest
from tiny_specs import make_tiny_spec

from sinklab.cli import progress, terminal
from sinklab.run_dir import RunDir
from sinklab.sweep.plan import SweepRun
from sinklab.sweep.run import run_sweep


def make_callback():
    display = progress.ProgressDisplay(terminal.make_console(stderr=True))
    return progress.ProgressCallback(display, 'mine', 8, descriptions=['a 1 -> 2'])


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
    with callback.display:
        callback.on_train_begin(0, 'dense', [])
        callback.on_record({'step': 8, 'train/loss': 2.0}, written=True)


# Program without JAX that writes the files of a run.
CHILD_SCRIPT = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
def write(**record):
    with (folder / 'metrics.jsonl').open('a') as file:
        print(json.dumps(record), file=file)
(folder / 'environment.json').write_text(json.dumps({'attempts': [{'step': 0, 'attention': 'dense'}]}))
write(**{'step': 0, 'sink/1': 0.0})
print('a warning', file=sys.stderr, flush=True)
print('words of a library')
write(**{'step': 8, 'train/loss': 3.5, 'sink/1': 53.25, 'speed/tokens_per_second': 1234.0})
"""


def test_output_into_pipe_is_plain_lines_that_name_their_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('FORCE_COLOR', '1')
    runs = [SweepRun(row, 0, RunDir(tmp_path / row), None, make_tiny_spec()) for row in ('softmax', 'sigmoid')]
    with progress.SweepDisplay(runs) as display:
        run_sweep(runs, lambda run: [sys.executable, '-c', CHILD_SCRIPT, str(run.run_dir)], display, lambda: None)
    output = capsys.readouterr().err
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


def test_remaining_time_of_all_runs_counts_their_steps(capsys):
    display = progress.ProgressDisplay(terminal.make_console(stderr=True))
    display.add_all_runs(24)
    first, _ = (display.add(name, 8) for name in 'ab')
    display.begin(first, 2)  # it resumes, and its two steps took none of this time
    display.all_runs.start_time -= 60
    display.update(first, {'step': 6, 'train/loss': 5.0})
    assert display.format_status(display.all_runs) == '04:30 left'  # 18 steps, 4 in a minute
    display.end(first, 'crashed')  # 16 are left
    assert capsys.readouterr().err.splitlines()[-1].endswith('step 6/22  04:00 left)')


def test_line_on_terminal_breaks_between_words(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv('COLUMNS', '30')
    monkeypatch.setattr(sys, 'stderr', file := Terminal())
    words = ['model.attention.offset', '0', '->', '-1;', 'probe.every_steps', '1', '->', '20']
    make_callback().on_message(' '.join(words))
    assert max(map(len, file.getvalue().splitlines())) <= 30
    assert file.getvalue().split() == ['mine', *words]
