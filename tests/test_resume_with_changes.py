"""Tests of runs that continue with changed fields, and of jobs that compete for one run folder."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import runs
from conftest import tiny
from runs import Died, Dying, Hearing, contents, outcome, parameters, timeless, train

from sinklab.config.spec import EXTENDABLE_SCHEDULES
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import lease
from sinklab.train.callbacks import Callback
from sinklab.train.optimizer import SCHEDULES


def make_spec(corpus, **changes):
    return runs.spec(corpus, **{'probe__every_steps': 0, **changes})


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_extendable_schedules_do_not_depend_on_number_of_steps(schedule):
    config = dataclasses.replace(tiny().optimizer, schedule=schedule, final_share=0.1)
    shorter, longer = (SCHEDULES[schedule](dataclasses.replace(config, steps=steps)) for steps in (8, 12))
    same = all(shorter(step) == longer(step) for step in range(8))
    assert same == (schedule in EXTENDABLE_SCHEDULES)


@pytest.mark.slow
def test_extended_run_is_identical_to_run_started_with_more_steps(corpus, tmp_path):
    longer, path = make_spec(corpus, optimizer__steps=12), tmp_path / 'run'
    train(make_spec(corpus), path)
    callback = Hearing()
    records = train(longer, path, callback)
    expected = train(longer, tmp_path / 'whole')
    assert callback.begun == (8, ['optimizer.steps 8 -> 12'])
    assert timeless(records, after=8) == timeless(expected, after=8)
    jax.tree.map(np.testing.assert_array_equal, parameters(path, 12), parameters(tmp_path / 'whole', 12))
    assert RunDir(path).read_json('config')['optimizer']['steps'] == 12
    with pytest.raises(UserError, match=r'step 12\b'):
        train(make_spec(corpus), path)


@pytest.mark.slow
def test_changed_field_is_recorded_with_step_of_change(corpus, tmp_path):
    folder, callback = RunDir(tmp_path / 'run'), Hearing()
    with pytest.raises(Died):
        train(make_spec(corpus), folder.path, Dying(6))
    train(make_spec(corpus, probe__every_steps=3), folder.path, callback)
    assert callback.begun == (4, ['probe.every_steps 0 -> 3'])
    first, second = folder.read_environment()['attempts']
    assert 'changes' not in first
    assert (second['step'], second['changes']) == (4, ['probe.every_steps 0 -> 3'])
    assert 'sink/1' in folder.read_records()[6]


@pytest.mark.slow
def test_changeable_fields_do_not_affect_parameters(corpus, tmp_path):
    frequent = dict(
        probe__every_steps=3, probe__keys=2, valid__every_steps=2, log__every_steps=3, checkpoint__every_steps=3
    )
    for name, changes in (('seldom', {}), ('often', frequent)):
        train(make_spec(corpus, **changes), tmp_path / name)
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path / 'seldom', 8), parameters(tmp_path / 'often', 8))


def read_settled_files(path):
    """Return the files that no background save may be writing."""
    return {file: content for file, content in contents(path).items() if 'checkpoints' not in file.parts}


@pytest.mark.slow
def test_second_job_is_rejected_and_does_not_affect_first(corpus, tmp_path):
    class SecondJob(Callback):
        def on_record(self, record, written):
            if record['step'] == 5:
                files_before = read_settled_files(tmp_path)
                with pytest.raises(UserError, match=rf'process {os.getpid()}\b'):
                    train(make_spec(corpus), tmp_path)
                files_after = read_settled_files(tmp_path)
                assert files_after.keys() == files_before.keys()
                assert {file.name for file in files_after if files_after[file] != files_before[file]} <= {
                    'lease.json'
                }
                assert not (tmp_path / 'outcome.json').exists()

    records = train(make_spec(corpus), tmp_path, SecondJob())
    assert [record['step'] for record in records] == list(range(9))
    assert outcome(tmp_path)['kind'] == 'done'
    assert not (tmp_path / 'lease.json').exists()


@pytest.mark.slow
def test_job_that_lost_lease_writes_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT_SECONDS', 0.0)

    class LeaseTaker(Callback):
        def on_record(self, record, written):
            if record['step'] == 5:
                content = lease.read_owner(tmp_path / 'lease.json') | dict(token='theirs', pid=17)
                (tmp_path / 'theirs').write_text(json.dumps(content))
                (tmp_path / 'theirs').replace(tmp_path / 'lease.json')
                self.before = contents(tmp_path)

    callback = LeaseTaker()
    with pytest.raises(lease.LeaseLostError, match=r'process 17\b'):
        train(make_spec(corpus, checkpoint__every_steps=0), tmp_path, callback)
    assert contents(tmp_path) == callback.before
    assert not (tmp_path / 'outcome.json').exists()
