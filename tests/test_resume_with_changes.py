"""Tests of runs that continue with changed fields, and of jobs that compete for one run folder."""

import dataclasses
import os

import grain
import jax
import numpy as np
import pytest
import tiny_runs as runs
from tiny_runs import (
    CrashError,
    CrashingCallback,
    RecordingCallback,
    drop_clock_metrics,
    load_parameters,
    read_contents,
    read_outcome,
    train_run,
)
from tiny_specs import make_tiny_spec

from sinklab.config.spec import EXTENDABLE_SCHEDULES
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train.callbacks import Callback
from sinklab.train.optimizer import SCHEDULES


def make_spec(corpus, **changes):
    return runs.make_spec(corpus, **{'probe__every_steps': 0, **changes})


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_extendable_schedules_do_not_depend_on_number_of_steps(schedule):
    config = dataclasses.replace(make_tiny_spec().optimizer, schedule=schedule, final_share=0.1)
    short_schedule, long_schedule = (
        SCHEDULES[schedule](dataclasses.replace(config, steps=steps)) for steps in (8, 12)
    )
    are_equal = all(short_schedule(step) == long_schedule(step) for step in range(8))
    assert are_equal == (schedule in EXTENDABLE_SCHEDULES)


@pytest.mark.slow
def test_extended_run_is_identical_to_run_started_with_more_steps(corpus, tmp_path):
    longer_spec, path = make_spec(corpus, optimizer__steps=12), tmp_path / 'run'
    train_run(make_spec(corpus), path)
    callback = RecordingCallback()
    records = train_run(longer_spec, path, callback)
    expected = train_run(longer_spec, tmp_path / 'whole')
    assert callback.train_begin_arguments == (8, ['optimizer.steps 8 -> 12'])
    assert drop_clock_metrics(records, after=8) == drop_clock_metrics(expected, after=8)
    jax.tree.map(np.testing.assert_array_equal, load_parameters(path, 12), load_parameters(tmp_path / 'whole', 12))
    assert RunDir(path).read_json('config')['optimizer']['steps'] == 12
    with pytest.raises(UserError, match=r'step 12\b'):
        train_run(make_spec(corpus), path)


@pytest.mark.slow
def test_changed_field_is_recorded_with_step_of_change(corpus, tmp_path):
    folder, callback = RunDir(tmp_path / 'run'), RecordingCallback()
    with pytest.raises(CrashError):
        train_run(make_spec(corpus), folder.path, CrashingCallback(6))
    train_run(make_spec(corpus, probe__every_steps=3), folder.path, callback)
    assert callback.train_begin_arguments == (4, ['probe.every_steps 0 -> 3'])
    first, second = folder.read_environment()['attempts']
    assert 'changes' not in first
    assert (second['step'], second['changes']) == (4, ['probe.every_steps 0 -> 3'])
    assert 'sink/1' in folder.read_records()[6]


@pytest.mark.exhaustive
def test_changeable_fields_do_not_affect_parameters(corpus, tmp_path):
    frequent_changes = dict(
        probe__every_steps=3, probe__keys=2, valid__every_steps=2, log__every_steps=3, checkpoint__every_steps=3
    )
    for name, changes in (('seldom', {}), ('often', frequent_changes)):
        train_run(make_spec(corpus, **changes), tmp_path / name)
    jax.tree.map(
        np.testing.assert_array_equal, load_parameters(tmp_path / 'seldom', 8), load_parameters(tmp_path / 'often', 8)
    )


def test_resume_with_other_order_of_data_is_rejected_and_changes_no_file(corpus, tmp_path, monkeypatch):
    with pytest.raises(CrashError):
        train_run(make_spec(corpus), tmp_path, CrashingCallback(6))
    files_before = read_contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(grain.MapDataset, 'shuffle', lambda dataset: dataset.slice(slice(None, None, -1)))
        with pytest.raises(UserError, match='order') as error:
            train_run(make_spec(corpus), tmp_path)
    assert '\n' not in str(error.value)
    assert read_contents(tmp_path) == files_before
    records = train_run(make_spec(corpus), tmp_path)
    assert records[-1]['step'] == 8


def read_settled_files(path):
    """Return the files that no background save may be writing."""
    return {file: content for file, content in read_contents(path).items() if 'checkpoints' not in file.parts}


@pytest.mark.slow
def test_second_job_is_rejected_and_does_not_affect_first(corpus, tmp_path):
    class SecondJob(Callback):
        def on_record(self, record, written):
            if record['step'] == 5:
                files_before = read_settled_files(tmp_path)
                with pytest.raises(UserError, match=rf'process {os.getpid()}\b'):
                    train_run(make_spec(corpus), tmp_path, grace_seconds=0)
                files_after = read_settled_files(tmp_path)
                assert files_after.keys() == files_before.keys()
                assert files_after == files_before
                assert not (tmp_path / 'outcome.json').exists()

    records = train_run(make_spec(corpus), tmp_path, SecondJob())
    assert [record['step'] for record in records] == list(range(9))
    assert read_outcome(tmp_path)['kind'] == 'done'
