"""What a person sees of a run under way."""

import pytest
from conftest import tiny

from sinklab.cli import progress


def shown(capsys, records, **changes):
    """The lines that a log has of these records."""
    listener = progress.ProgressCallback('mine', tiny(**changes))
    for record in records:
        listener.on_record(record, written=True)
    return capsys.readouterr().err.splitlines()


def test_a_sink_that_was_measured_before_is_told_with_its_step(capsys, monkeypatch):
    monkeypatch.setattr(progress, 'LOG_SECONDS', -1.0)
    losses = [{'step': step, 'train/loss': 5.0} for step in range(1, 5)]
    losses[2] |= {'sink/1': 20.0}
    lines = shown(capsys, [{'step': 0, 'sink/1': 10.0}, *losses])
    assert [line.partition('Sink_1 ')[2] for line in lines] == [
        '10.0 %',
        '10.0 % at step 0',
        '10.0 % at step 0',
        '20.0 %',
        '20.0 % at step 3',
    ]
    assert shown(capsys, losses[:1])[0].endswith('Sink_1 -')


@pytest.mark.parametrize(
    ('every', 'step', 'told'), [(0, 0, True), (8, 0, True), (4, 0, False), (4, 3, False), (4, 4, True), (3, 4, False)]
)
def test_a_run_that_saves_nothing_before_its_end_says_so_at_its_start(capsys, every, step, told):
    progress.ProgressCallback('mine', tiny(checkpoint__every_steps=every)).on_train_begin(
        step, 'chunked, earlier dense', []
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == 'mine  attention: chunked, earlier dense'
    assert any('saves a checkpoint only at the end' in line for line in lines) == told


def test_what_a_row_comes_to_is_said_at_its_start(capsys):
    said = 'at size smoke: optimizer.steps 4 -> 8'
    progress.ProgressCallback('mine', tiny(), row_description=said).on_train_begin(0, 'dense', [])
    assert capsys.readouterr().err.splitlines()[0] == f'mine  {said}'


def test_what_has_changed_since_a_step_is_said(capsys):
    progress.ProgressCallback('mine', tiny(checkpoint__every_steps=2)).on_train_begin(
        4, 'dense', ['a 1 -> 2', 'b 3 -> 4']
    )
    assert capsys.readouterr().err.splitlines()[1:] == ['mine  since step 4: a 1 -> 2; b 3 -> 4']
