"""Commands in a shell: narrow terminals, closed pipes, Ctrl-C, and names that are not UTF-8."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from synthetic_runs import write_run
from tiny_runs import read_outcome

from sinklab.cli import terminal
from sinklab.cli.main import main
from sinklab.report import summary_table

SINKLAB = shlex.join([sys.executable, '-m', 'sinklab'])


def run_shell(command: str) -> tuple[int, str]:
    """Return the exit code of the first command of a pipe, and the standard error of the shell."""
    process = subprocess.run(
        ['bash', '-c', f'{command}; exit ${{PIPESTATUS[0]}}'], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return process.returncode, process.stderr.decode()


@pytest.mark.parametrize('columns', [80, 60, 40])
def test_report_shows_whole_numbers_on_narrow_terminal(tmp_path, monkeypatch, capsys, columns):
    metrics = {'sink/star': 12.345, 'entropy/row': 3.14159, 'sink/star/clean': 1.5}
    names = ['softmax', 'a row with a name that is much longer than there is room for']
    paths = [
        write_run(tmp_path / str(index), name, steps=(0, 10, 20000), extra_metrics=metrics)
        for index, name in enumerate(names)
    ]
    assert main(['report', *paths, '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    monkeypatch.setenv('COLUMNS', str(columns))
    assert main(['report', *paths]) == 0
    text = capsys.readouterr().out.partition('report: ')[0]
    table = text.partition('step: ')[0]
    words = re.sub(r'\s+', ' ', text)
    cells = {cell for row in rows for cell in summary_table.format_run_cells(row)[1:] if cell != '-'}
    assert [cell for cell in cells if not re.search(rf'(?<!\S){re.escape(cell)}(?!\S)', words)] == []
    assert max(map(len, table.splitlines())) <= columns
    assert '…' not in text


def test_print_table_keeps_names_whole_up_to_a_third_of_the_width(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '80')
    name, numbers = 'sigmoid_normalized, seed 0', [f'{number}.000000' for number in range(9)]
    terminal.print_table(terminal.make_console(), ['run', *numbers], [[name, *numbers]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(f' {name} ') for line in lines[1::2])


@pytest.mark.parametrize('columns', [60, 80, 200])
def test_print_table_wraps_text_columns_and_keeps_numbers_whole(monkeypatch, capsys, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    names, numbers = ['a task that has a long name', 'a metric that has a long name'], ['12,345,678', '0.1234±0.0056']
    headings = ['task', 'metric', 'n', 'value']
    terminal.print_table(terminal.make_console(), headings, [[*names, *numbers]], wrap_columns=['metric'])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == headings  # in one piece
    assert max(map(len, lines)) <= columns
    assert {*names[0].split(), *names[1].split(), *numbers} <= {*' '.join(lines).split()}


@pytest.mark.slow
@pytest.mark.parametrize('streams', ['2>&1 | head -1', pytest.param('>/dev/full 2>&1', marks=pytest.mark.exhaustive)])
def test_unwritable_log_does_not_change_run(config, tmp_path, streams):
    assert run_shell(f'{SINKLAB} train --config={config} --workdir={tmp_path}/run {streams}')[0] == 0
    assert (read_outcome(tmp_path / 'run')['kind'], read_outcome(tmp_path / 'run')['checkpoint']) == ('done', 8)


@pytest.mark.slow
@pytest.mark.parametrize('command', ['rows | head -1', '--help | true'])
def test_closed_pipe_is_no_error(command):
    assert run_shell(f'{SINKLAB} {command}') == (0, '')


def test_ctrl_c_ends_command_with_130_and_one_line():
    script = 'from sinklab.cli import main, rows\ndef run(*_): raise KeyboardInterrupt\nrows.run = run\n'
    process = subprocess.run([sys.executable, '-c', f'{script}main.main(["rows"])'], capture_output=True)
    assert (process.returncode, process.stdout, len(process.stderr.splitlines())) == (130, b'', 1)


@pytest.mark.slow
def test_name_that_is_not_utf8_is_printed_escaped(tmp_path):
    command = [*shlex.split(SINKLAB), 'report', os.fsdecode(b'x\xff')]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, '\\udcff' in process.stderr, len(process.stderr.splitlines())) == (1, True, 1)
