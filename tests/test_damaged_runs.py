"""Runs with damaged checkpoints: they resume from a sound one, or are refused."""

import shutil

import pytest
from tiny_runs import RecordingCallback, drop_clock_metrics, make_spec, train_run

from sinklab.run_dir import RunDir


@pytest.mark.slow
def test_run_resumes_from_sound_checkpoint_to_same_result(finished_run, corpus, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '8' / 'state')
    callback = RecordingCallback()
    records = train_run(make_spec(corpus), tmp_path / 'run', callback)
    assert drop_clock_metrics(records) == drop_clock_metrics(finished_run[1])
    assert callback.messages[0].startswith(f'{tmp_path}/run/checkpoints/8 ')
    assert RunDir(tmp_path / 'run').list_checkpoint_steps() == [4, 8]
