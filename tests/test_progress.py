"""Progress log of a run."""

import pytest
from conftest import make_tiny_spec

from sinklab.cli import progress


def log_records(capsys, records, **changes):
    """Return the log lines of these records."""
    callback = progress.ProgressCallback('mine', make_tiny_spec(**changes))
    for record in records:
        callback.on_record(record, written=True)
    return capsys.readouterr().err.splitlines()


def test_progress_shows_last_sink_with_its_step(capsys, monkeypatch):
    monkeypatch.setattr(progress, 'LOG_SECONDS', -1.0)
    losses = [{'step': step, 'train/loss': 5.0} for step in range(1, 5)]
    losses[2] |= {'sink/1': 20.0}
    lines = log_records(capsys, [{'step': 0, 'sink/1': 10.0}, *losses])
    assert [line.partition('Sink_1 ')[2] for line in lines] == [
        '10.0 %',
        '10.0 % at step 0',
        '10.0 % at step 0',
        '20.0 %',
        '20.0 % at step 3',
    ]
    assert log_records(capsys, losses[:1])[0].endswith('Sink_1 -')


@pytest.mark.parametrize(
    ('every_steps', 'step', 'is_reported'),
    [(0, 0, True), (8, 0, True), (4, 0, False), (4, 3, False), (4, 4, True), (3, 4, False)],
)
def test_progress_reports_run_without_intermediate_checkpoints(capsys, every_steps, step, is_reported):
    progress.ProgressCallback('mine', make_tiny_spec(checkpoint__every_steps=every_steps)).on_train_begin(
        step, 'chunked, earlier dense', []
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == 'mine  attention: chunked, earlier dense'
    assert any('config.checkpoint.every_steps' in line for line in lines) == is_reported


def test_progress_prints_row_description_first(capsys):
    description = 'at size smoke: optimizer.steps 4 -> 8'
    progress.ProgressCallback('mine', make_tiny_spec(), row_description=description).on_train_begin(0, 'dense', [])
    assert capsys.readouterr().err.splitlines()[0] == f'mine  {description}'


@pytest.mark.parametrize('step', [0, 3])
def test_progress_prints_step_after_which_run_resumes(capsys, step):
    progress.ProgressCallback('mine', make_tiny_spec(checkpoint__every_steps=2)).on_train_begin(step, 'dense', [])
    assert capsys.readouterr().err.splitlines()[1:] == ['mine  resumes after step 3'] * (step > 0)


def test_progress_prints_changes_since_step(capsys):
    progress.ProgressCallback('mine', make_tiny_spec(checkpoint__every_steps=2)).on_train_begin(
        4, 'dense', ['a 1 -> 2', 'b 3 -> 4']
    )
    assert capsys.readouterr().err.splitlines()[1:] == ['mine  since step 4: a 1 -> 2; b 3 -> 4']
