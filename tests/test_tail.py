"""Command `sinklab tail`: each record once, in order, until the run ends."""

import json

import pytest
from commands import get_error_line
from tiny_specs import make_tiny_spec

from sinklab.cli import tail
from sinklab.cli.main import main
from sinklab.cli.progress import RunFollower
from sinklab.escape import quote_file_name
from sinklab.run_dir import RunDir
from sinklab.storage.folder_lock import hold_folder


class RecordingDisplay:
    """A display that keeps the steps of records and the lines."""

    def __init__(self):
        self.steps, self.lines = [], []

    def add(self, name, steps):
        return name

    def begin(self, key, step):
        pass

    def print_line(self, line):
        self.lines.append(line)

    def update(self, key, *records):
        self.steps += [record['step'] for record in records]


@pytest.fixture
def folder(tmp_path):
    folder = RunDir(tmp_path / 'run')
    folder.initialize(make_tiny_spec(), dict(row='tiny'))
    return folder


def append_metrics(folder, text):
    with (folder.path / 'metrics.jsonl').open('a') as file:
        file.write(text)


def format_record(step, **metrics):
    return json.dumps(dict(step=step, **metrics)) + '\n'


def write_attempts(folder, **steps_by_attention):
    entries = [dict(step=step, attention=attention) for attention, step in steps_by_attention.items()]
    folder.write_json('environment', dict(attempts=entries))


def test_follower_reports_each_record_once_in_order(folder):
    display = RecordingDisplay()
    follower = RunFollower(display, 'tiny', 8, folder)
    follower.poll()
    assert (display.steps, display.lines) == ([], [])
    write_attempts(folder, dense=0)
    append_metrics(folder, format_record(1) + format_record(2))
    follower.poll()
    append_metrics(folder, format_record(3)[:5])
    follower.poll()
    assert (display.steps, display.lines) == ([1, 2], ['tiny  attention: dense'])
    append_metrics(folder, format_record(3)[5:] + format_record(4))
    follower.poll()
    write_attempts(folder, dense=0, chunked=4)
    follower.poll()
    assert display.steps == [1, 2, 3, 4]
    assert display.lines[1:] == ['tiny  attention: chunked', 'tiny  resumes after step 4']


def test_follower_of_resumed_run_skips_earlier_attempts(folder):
    write_attempts(folder, dense=0)
    append_metrics(folder, format_record(1) + format_record(2))
    display = RecordingDisplay()
    follower = RunFollower(display, 'tiny', 8, folder)
    follower.skip()
    follower.poll()
    assert (display.steps, display.lines) == ([], [])
    write_attempts(folder, dense=0, chunked=2)
    append_metrics(folder, format_record(3))
    follower.poll()
    assert (display.steps, display.lines[0]) == ([3], 'tiny  attention: chunked')


def test_follower_starts_with_last_measurement_and_newest_record(folder):
    for step in range(1, 9):
        append_metrics(folder, format_record(step, **({'sink/1': 0.5} if step in (3, 6) else {})))
    display = RecordingDisplay()
    RunFollower(display, 'tiny', 8, folder).poll()
    assert display.steps == [6, 8]
    append_metrics(folder, format_record(9, **{'sink/1': 0.5}))
    display = RecordingDisplay()
    RunFollower(display, 'tiny', 8, folder).poll()
    assert display.steps == [6, 9]


def test_tail_of_sweep_shows_all_runs_until_no_process_works_on_it(tmp_path, capsys, monkeypatch):
    def write_sweep(outcome):
        (tmp_path / 'sweep.json').write_text(
            json.dumps([dict(row=name, seeds={'0': outcome}) for name in ('a', 'b/c')])
        )

    def start_run(name):
        run_dir = RunDir(tmp_path / f'{quote_file_name(name)}-0')
        run_dir.initialize(make_tiny_spec(), dict(row=name))
        append_metrics(run_dir, format_record(8))
        run_dir.write_json('outcome', dict(kind='done', message=''))

    write_sweep('to do')
    with hold_folder(tmp_path):
        actions = iter([lambda: start_run('a'), lambda: start_run('b/c'), lambda: write_sweep('done')])
        monkeypatch.setattr(tail.time, 'sleep', lambda seconds: next(actions)())
        assert main(['tail', str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split('  ')[0] for line in lines] == [
        name for name in ('a, seed 0', 'b/c, seed 0') for _ in range(2)
    ]
    assert [line.split('  ')[1].split()[0] for line in lines] == ['step', 'done'] * 2


def test_tail_of_killed_sweep_follows_runs_that_go_on(tmp_path, capsys, monkeypatch):
    (tmp_path / 'sweep.json').write_text(json.dumps([dict(row='a', seeds={'0': 'to do'}, steps=8)]))
    run_dir = RunDir(tmp_path / 'a-0')
    run_dir.initialize(make_tiny_spec(), dict(row='a'))
    with hold_folder(run_dir.path):
        monkeypatch.setattr(tail.time, 'sleep', lambda seconds: run_dir.write_json('outcome', dict(kind='done')))
        assert main(['tail', str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith('a, seed 0  done')


@pytest.mark.parametrize(
    ('outcome', 'line'),
    [
        (dict(kind='done', message=''), 'tiny  done'),
        (dict(kind='refused', message='no room'), 'tiny  refused: no room'),
        (None, 'tiny  lost: no process works on this run; start the same command again'),
    ],
)
def test_tail_prints_outcome_of_finished_run(folder, capsys, outcome, line):
    if outcome:
        folder.write_json('outcome', outcome)
    append_metrics(folder, json.dumps({'step': 8, 'train/loss': 2.5}) + '\n')
    contents = {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()}
    assert main(['tail', str(folder)]) == 0
    output_lines = capsys.readouterr().out.splitlines()  # for `tail RUN | grep`
    assert output_lines[0].startswith('tiny  step 8/8  loss 2.500')
    assert output_lines[1:] == [line]
    assert {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()} == contents


def test_tail_names_run_without_row_by_its_folder(folder, capsys):
    folder.write_json('row', {})
    append_metrics(folder, format_record(8))
    assert main(['tail', str(folder)]) == 0
    assert capsys.readouterr().out.startswith('run  step 8/8')


@pytest.mark.parametrize('arguments', [['nothing'], ['nothing', '--fast'], ['file']])
def test_tail_rejects_missing_run_with_one_line(tmp_path, capsys, arguments):
    (tmp_path / 'file').write_text('no run')
    message = get_error_line(capsys, 'tail', f'{tmp_path}/{arguments[0]}', *arguments[1:])
    assert message.startswith('sinklab tail: ')
    assert 'config.json' not in message
