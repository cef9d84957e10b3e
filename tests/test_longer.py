"""A run that goes on with more steps or other probes, and one that another job wants, too."""

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
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
from sinklab.storage import lease
from sinklab.train.callbacks import Callback
from sinklab.train.optimizer import SCHEDULES


def spec(corpus, **changes):
    return runs.spec(corpus, **{'probe__every_steps': 0, **changes})


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_a_schedule_is_open_ended_if_more_steps_leave_it_as_it_is(schedule):
    given = dataclasses.replace(tiny().optimizer, schedule=schedule, final_share=0.1)
    shorter, longer = (SCHEDULES[schedule](dataclasses.replace(given, steps=steps)) for steps in (8, 12))
    same = all(shorter(step) == longer(step) for step in range(8))
    assert same == (schedule in EXTENDABLE_SCHEDULES)


@pytest.mark.slow
def test_a_finished_run_of_more_steps_is_the_run_that_had_them_from_the_start(corpus, tmp_path):
    longer, path = spec(corpus, optimizer__steps=12), tmp_path / 'run'
    train(spec(corpus), path)
    hearing = Hearing()
    records = train(longer, path, hearing)
    whole = train(longer, tmp_path / 'whole')
    assert hearing.begun == (8, ['optimizer.steps 8 -> 12'])
    assert timeless(records, after=8) == timeless(whole, after=8)
    jax.tree.map(np.testing.assert_array_equal, parameters(path, 12), parameters(tmp_path / 'whole', 12))
    assert RunDir(path).read_json('config')['optimizer']['steps'] == 12
    with pytest.raises(UserError, match='is at step 12'):
        train(spec(corpus), path)


@pytest.mark.slow
def test_what_has_changed_is_noted_at_the_step_where_it_has(corpus, tmp_path):
    folder, hearing = RunDir(tmp_path / 'run'), Hearing()
    with pytest.raises(Died):
        train(spec(corpus), folder.path, Dying(6))
    train(spec(corpus, probe__every_steps=3), folder.path, hearing)
    assert hearing.begun == (4, ['probe.every_steps 0 -> 3'])
    first, second = folder.read_environment()['attempts']
    assert 'changes' not in first
    assert (second['step'], second['changes']) == (4, ['probe.every_steps 0 -> 3'])
    assert 'sink/1' in folder.read_records()[6]


@pytest.mark.slow
def test_what_may_change_changes_no_bit_of_a_parameter(corpus, tmp_path):
    often = dict(
        probe__every_steps=3, probe__keys=2, valid__every_steps=2, log__every_steps=3, checkpoint__every_steps=3
    )
    for name, changes in (('seldom', {}), ('often', often)):
        train(spec(corpus, **changes), tmp_path / name)
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path / 'seldom', 8), parameters(tmp_path / 'often', 8))


def settled(path):
    """What is not just being written by the background of a save."""
    return {file: content for file, content in contents(path).items() if 'checkpoints' not in file.parts}


@pytest.mark.slow
def test_a_second_job_is_refused_and_leaves_the_first_alone(corpus, tmp_path):
    class Second(Callback):
        def on_record(self, record, written):
            if record['step'] == 5:
                before = settled(tmp_path)
                with pytest.raises(UserError, match=f'is in use: another job .process {os.getpid()} on '):
                    train(spec(corpus), tmp_path)
                after = settled(tmp_path)
                assert after.keys() == before.keys()
                assert {file.name for file in after if after[file] != before[file]} <= {'lease.json'}
                assert not (tmp_path / 'outcome.json').exists()

    records = train(spec(corpus), tmp_path, Second())
    assert [record['step'] for record in records] == list(range(9))
    assert outcome(tmp_path)['kind'] == 'done'
    assert not (tmp_path / 'lease.json').exists()


@pytest.mark.slow
def test_a_job_that_another_has_taken_over_from_writes_nothing_more(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT_SECONDS', 0.0)

    class Taken(Callback):
        def on_record(self, record, written):
            if record['step'] == 5:
                content = lease.read_owner(tmp_path / 'lease.json') | dict(token='theirs', pid=17)
                (tmp_path / 'theirs').write_text(json.dumps(content))
                (tmp_path / 'theirs').replace(tmp_path / 'lease.json')
                self.before = contents(tmp_path)

    taken = Taken()
    with pytest.raises(lease.LeaseLostError, match=r'process 17 on .* has taken over'):
        train(spec(corpus, checkpoint__every_steps=0), tmp_path, taken)
    assert contents(tmp_path) == taken.before
    assert not (tmp_path / 'outcome.json').exists()
