"""Command `sinklab tail`: each record once, in order, until the run ends."""

import json

import pytest
from conftest import make_tiny_spec

from sinklab.cli import tail
from sinklab.cli.main import main
from sinklab.run_dir import RunDir
from sinklab.storage.lease import UNREADABLE_OWNER, hold_lease
from sinklab.train.callbacks import Callback


class Told(Callback):
    def __init__(self):
        self.steps, self.begun = [], []

    def on_train_begin(self, step, attention, changes):
        self.begun.append((step, attention, changes))

    def on_record(self, record, written):
        self.steps.append(record['step'])


@pytest.fixture
def folder(tmp_path):
    folder = RunDir(tmp_path / 'run')
    folder.initialize(make_tiny_spec(), dict(row='tiny'))
    return folder


def write(folder, text):
    with (folder.path / 'metrics.jsonl').open('a') as file:
        file.write(text)


def line(step, **numbers):
    return json.dumps(dict(step=step, **numbers)) + '\n'


def attempts(folder, **said):
    known = [dict(step=step, attention=attention) for attention, step in said.items()]
    folder.write_json('environment', dict(attempts=known))


def test_follow_run_reports_each_record_once_in_order_until_end(folder):
    told = Told()
    with hold_lease(folder.path):
        looks = tail.follow_run(folder, told)
        next(looks)
        assert (told.steps, told.begun) == ([], [])
        attempts(folder, dense=0)
        write(folder, line(1) + line(2))
        next(looks)
        write(folder, line(3)[:5])
        next(looks)
        assert (told.steps, told.begun) == ([1, 2], [(0, 'dense', [])])
        write(folder, line(3)[5:] + line(4))
        next(looks)
        next(looks)
        attempts(folder, dense=0, chunked=4)
        next(looks)
        assert (told.steps, told.begun[1:]) == ([1, 2, 3, 4], [(4, 'chunked, earlier dense', [])])
        write(folder, line(5))
        folder.write_json('outcome', dict(kind='done', message=''))
    assert list(looks) == []
    assert told.steps == [1, 2, 3, 4, 5]


def test_follow_run_starts_with_last_measurement_and_newest_record(folder):
    for step in range(1, 9):
        write(folder, line(step, **({'sink/1': 0.5} if step in (3, 6) else {})))
    told = Told()
    next(tail.follow_run(folder, told))
    assert told.steps == [6, 8]
    write(folder, line(9, **{'sink/1': 0.5}))
    told = Told()
    next(tail.follow_run(folder, told))
    assert told.steps == [6, 9]


def test_follow_run_ends_after_heartbeat_timeout_of_remote_owner(folder, monkeypatch):
    (folder.path / 'lease.json').write_text(json.dumps(UNREADABLE_OWNER | dict(machine='another')))
    folder.write_json('outcome', dict(kind='stopped', message=''))  # of the previous attempt
    looks = tail.follow_run(folder, Told())
    next(looks)
    monkeypatch.setattr('sinklab.storage.lease.OWNER_TIMEOUT_SECONDS', 0.0)
    assert list(looks) == []


def test_follow_run_waits_for_restart_of_lost_run(folder, monkeypatch):
    looks = tail.follow_run(folder, Told())
    next(looks)
    folder.write_json('outcome', dict(kind='lost', message=''))
    next(looks)
    with hold_lease(folder.path):
        next(looks)
    monkeypatch.setattr(tail, 'RESTART_SECONDS', 0.0)
    assert list(looks) == []


@pytest.mark.parametrize(
    ('outcome', 'words'),
    [
        (dict(kind='done', message=''), 'tiny  done'),
        (dict(kind='refused', message='no room'), 'tiny  refused: no room'),
        (None, 'tiny  lost: no process works on this run; start the same command again'),
    ],
)
def test_tail_prints_outcome_of_finished_run(folder, monkeypatch, capsys, outcome, words):
    monkeypatch.setattr(tail, 'RESTART_SECONDS', 0.0)
    if outcome:
        folder.write_json('outcome', outcome)
    write(folder, json.dumps({'step': 8, 'train/loss': 2.5}) + '\n')
    before = {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()}
    assert main(['tail', str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()  # for `tail RUN | grep`
    assert said[0].startswith('tiny  step 8/8  loss 2.500')
    assert said[1:] == [words]
    assert {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()} == before


@pytest.mark.parametrize('given', [['nothing'], ['nothing', '--fast']])
def test_tail_rejects_missing_run_with_one_line(tmp_path, capsys, given):
    assert main(['tail', f'{tmp_path}/{given[0]}', *given[1:]]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith('sinklab tail: ')
