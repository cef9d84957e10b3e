"""Tests of the run folder: outcomes, config checks and names."""

import dataclasses
import json
import shlex

import pytest
from conftest import make_tiny_spec
from tiny_runs import write_checkpoints

from sinklab.config.spec import CHANGEABLE_FIELDS, Hardware, Spec
from sinklab.errors import UserError
from sinklab.resume_checks import check_run_dir, list_changes
from sinklab.run_dir import RunDir
from sinklab.sweep import plan


@pytest.fixture
def folder(tmp_path):
    """Make the folder of a run whose 8 steps are done."""
    folder, spec = RunDir(tmp_path / 'run'), make_tiny_spec()
    folder.initialize(spec, {})
    write_checkpoints(folder, 8)
    records = [{'step': step, 'seconds': 1.0, 'valid/loss': loss} for step, loss in ((0, 5.9), (8, 5.1))]
    (folder.path / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    return folder


def test_run_without_last_metrics_is_not_done(folder):
    run = plan.SweepRun('softmax', 0, folder, None, make_tiny_spec())
    plan.check_run(run, Hardware())
    assert (run.outcome, run.reason) == ('done', '')
    metrics = folder.path / 'metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes()[:-20])
    run = plan.SweepRun('softmax', 0, folder, None, make_tiny_spec())
    plan.check_run(run, Hardware())
    assert run.outcome == 'to do'


def test_run_with_incomplete_last_checkpoint_is_not_done(folder):
    (folder.digest_dir / '8' / '0.json').unlink()
    run = plan.SweepRun('softmax', 0, folder, None, make_tiny_spec())
    plan.check_run(run, Hardware())
    assert run.outcome == 'to do'


def test_check_run_dir_names_corrupt_config(folder):
    check_run_dir(folder, make_tiny_spec())
    (folder.path / 'config.json').write_text('{"a":')
    with pytest.raises(UserError, match=r'config\.json'):
        check_run_dir(folder, make_tiny_spec())


def test_check_run_dir_of_other_version_names_fields_and_commit(folder):
    config = folder.read_json('config')
    config['model']['width_of_old'] = config['model'].pop('width')
    folder.write_json('config', config)
    folder.write_json('environment', dict(commit='0123abc'))
    with pytest.raises(UserError) as error:
        check_run_dir(folder, make_tiny_spec())
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert 'model.width_of_old' in message
    assert 'model.width' in message.replace('model.width_of_old', '')
    assert '0123abc' in message
    assert f'--workdir={folder}-2' in message
    config['model']['width'] = 16
    folder.write_json('config', config)
    (folder.path / 'environment.json').unlink()
    with pytest.raises(UserError, match=r'model\.width_of_old.* commit None'):
        check_run_dir(folder, make_tiny_spec())


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({}, []),
        (dict(probe__every_steps=4, probe__length=8), ['probe.every_steps 0 -> 4', 'probe.length 12 -> 8']),
        (dict(log__every_steps=2, valid__windows=5), ['valid.windows 6 -> 5', 'log.every_steps 1 -> 2']),
        (dict(checkpoint__keep=9), ['checkpoint.keep 3 -> 9']),
        (dict(optimizer__steps=20), ['optimizer.steps 8 -> 20']),
    ],
)
def test_check_run_dir_accepts_and_lists_changeable_fields(folder, changes, expected):
    check_run_dir(folder, make_tiny_spec(**changes))
    assert sorted(list_changes(folder, make_tiny_spec(**changes))) == sorted(expected)


@pytest.mark.parametrize(
    'part', [field.name for field in dataclasses.fields(Spec) if field.name not in CHANGEABLE_FIELDS]
)
def test_check_run_dir_rejects_changes_of_other_fields(folder, part):
    changes = dict(model=dict(model__norm='post'), optimizer=dict(optimizer__weight_decay=0.3), seed=dict(seed=1))
    changes |= dict(data=dict(data__seed=1), log=dict(log__rows=True), probe=dict(probe__keys=2))
    with pytest.raises(UserError, match=f'\\({part}'):
        check_run_dir(folder, make_tiny_spec(**changes[part]))


def test_check_run_dir_rejects_fewer_steps_than_done(folder):
    with pytest.raises(UserError, match=r'step 8.*config\.optimizer\.steps.* 7.*at least 8'):
        check_run_dir(folder, make_tiny_spec(optimizer__steps=7))


def test_check_run_dir_rejects_more_steps_of_cosine_with_fork_command(tmp_path):
    folder, cosine_changes = (
        RunDir(tmp_path / "an o'dd run"),
        dict(optimizer__schedule='cosine', optimizer__final_share=0.1),
    )
    folder.initialize(make_tiny_spec(**cosine_changes), {})
    with pytest.raises(UserError) as error:
        check_run_dir(folder, make_tiny_spec(**cosine_changes, optimizer__steps=20))
    assert shlex.split(str(error.value).rpartition(': ')[2]) == [f'--workdir={folder}-2']
    (folder.checkpoint_dir / '8').mkdir(parents=True)
    with pytest.raises(UserError, match=r'cosine.* 8 to 20') as error:
        check_run_dir(folder, make_tiny_spec(**cosine_changes, optimizer__steps=20))
    options = [f'--from={folder}@8', '--config.optimizer.steps=20', f'--workdir={folder}-2']
    assert shlex.split(str(error.value).rpartition(': ')[2]) == options


@pytest.mark.parametrize('name', ['a\nb', 'a\tb', 'a\x7f', 'a\x1b[2J', 'a\x85b'])
def test_run_dir_name_with_control_character_is_rejected_with_one_line(name):
    with pytest.raises(UserError, match='control character') as error:
        RunDir(name)
    assert str(error.value).isprintable()


@pytest.mark.parametrize('name', ['a b', 'a"b', "a'b", 'a;b', 'Größe', 'x/../a', 'a@5'])
def test_run_dir_name_may_have_special_characters(tmp_path, name):
    (tmp_path / 'x').mkdir()
    folder = RunDir(f'{tmp_path}/{name}')
    folder.initialize(make_tiny_spec(), {})
    check_run_dir(folder, make_tiny_spec())


@pytest.mark.parametrize('name', ['lease.json', 'digests', 'damaged', 'probe', 'x.unfinished'])
def test_check_run_dir_accepts_files_written_before_config(tmp_path, name):
    (tmp_path / name).touch()
    check_run_dir(RunDir(tmp_path), make_tiny_spec())
