"""Runs with damaged checkpoints: resume from a valid one, or an error."""

import shutil

import pytest
from tiny_runs import RecordingCallback, drop_clock_metrics, make_spec, train_run

from sinklab.errors import UserError
from sinklab.report import runs
from sinklab.run_dir import RunDir


@pytest.mark.slow
def test_damaged_checkpoint_falls_back_to_previous_step(finished_run, corpus, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '8' / 'state')
    callback = RecordingCallback()
    assert drop_clock_metrics(train_run(make_spec(corpus), tmp_path / 'run', callback)) == drop_clock_metrics(
        finished_run[1]
    )
    (line,) = callback.messages
    assert line.startswith(f'{tmp_path}/run/checkpoints/8 ')
    assert ' state/' in line
    assert RunDir(tmp_path / 'run').list_checkpoint_steps() == [4, 8]


@pytest.mark.slow
def test_run_with_only_damaged_checkpoints_is_refused_until_they_are_deleted(finished_run, corpus, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / 'run')
    checkpoint_dir = tmp_path / 'run' / 'checkpoints'
    for step in (4, 8):
        shutil.rmtree(checkpoint_dir / str(step) / 'state')
    with pytest.raises(UserError, match=r'delete .*/checkpoints'):
        train_run(make_spec(corpus), tmp_path / 'run')
    shutil.rmtree(checkpoint_dir)
    assert drop_clock_metrics(train_run(make_spec(corpus), tmp_path / 'run')) == drop_clock_metrics(finished_run[1])


@pytest.mark.slow
def test_lost_metric_lines_are_reported_on_resume_and_in_report(finished_run, corpus, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(finished_run[0], run)
    lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (run / 'metrics.jsonl').write_text(''.join(lines[:3]))  # steps 0, 1, 2
    callback = RecordingCallback()
    train_run(make_spec(corpus), run, callback)
    (note,) = callback.messages
    assert 'steps 2 and 8' in note
    capsys.readouterr()
    runs.read_runs([str(run)])
    assert any('steps 2 and 8' in line for line in capsys.readouterr().err.splitlines())


def test_find_gaps_accounts_for_changed_log_interval(tmp_path):
    folder = RunDir(tmp_path)
    (tmp_path / 'row.json').write_text('{"row": "tiny"}')

    def list_gaps(steps, interval, end=None):
        return folder.find_gaps([{'step': step, 'train/loss': 1.0} for step in steps], interval, end)

    assert list_gaps([10, 20, 25, 30], 10, 35) == []
    assert list_gaps([10, 20, 50], 10) == [(20, 50)]
    assert list_gaps([30, 40], 10, 40) == [(0, 30)]
    assert list_gaps([10, 20], 10, 40) == [(20, 40)]
    attempts = [
        dict(step=0, attention='dense'),
        dict(step=50, attention='dense', changes=['log.every_steps 30 -> 10']),
    ]
    folder.write_json('environment', dict(attempts=attempts))
    assert list_gaps([30, 60, 70], 10) == []
    assert list_gaps([30, 60, 100], 10) == [(60, 100)]
