"""The run folder: what is damaged in it is said, and nothing old is taken for its end."""

import dataclasses
import json
import shlex

import pytest
from conftest import tiny, tiny_config
from runs import saved

from sinklab.config.spec import (
    CHANGEABLE_FIELDS,
    DEFAULTS_FOR_OLD_CONFIGS,
    Hardware,
    Spec,
)
from sinklab.config.validate import parse_config
from sinklab.run_dir import RunDir, flatten_dict
from sinklab.schema import UserError
from sinklab.sweep import plan


@pytest.fixture
def folder(tmp_path):
    """Of a run whose 8 steps are done."""
    folder, spec = RunDir(tmp_path / 'run'), tiny()
    folder.initialize(spec, {})
    saved(folder, 8)
    records = [{'step': step, 'seconds': 1.0, 'valid/loss': loss} for step, loss in ((0, 5.9), (8, 5.1))]
    (folder.path / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    return folder


def test_a_run_that_has_lost_the_numbers_of_its_end_is_not_done(folder):
    run = plan.SweepRun('softmax', 0, folder, None, tiny())
    plan.check_run(run, Hardware())
    assert (run.outcome, run.reason) == ('done', '')
    metrics = folder.path / 'metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes()[:-20])
    run = plan.SweepRun('softmax', 0, folder, None, tiny())
    plan.check_run(run, Hardware())
    assert run.outcome == 'to do'


def test_a_run_whose_last_save_was_cut_short_is_not_done(folder):
    (folder.digest_dir / '8' / '0.json').unlink()
    run = plan.SweepRun('softmax', 0, folder, None, tiny())
    plan.check_run(run, Hardware())
    assert run.outcome == 'to do'


def test_a_damaged_config_is_named(folder):
    folder.check_spec(tiny())
    (folder.path / 'config.json').write_text('{"a":')
    with pytest.raises(UserError, match=r'config\.json is damaged .* restore it from a copy, or use another folder'):
        folder.check_spec(tiny())


def test_a_run_of_another_version_is_refused_with_what_differs_and_its_commit(folder):
    config = folder.read_json('config')
    config['model']['width_of_old'] = config['model'].pop('width')
    folder.write_json('config', config)
    folder.write_json('environment', dict(commit='0123abc'))
    with pytest.raises(UserError) as refusal:
        folder.check_spec(tiny())
    line = str(refusal.value)
    assert len(line.splitlines()) == 1
    assert 'whose config has the unknown fields model.width_of_old and lacks model.width;' in line
    assert f'use commit 0123abc, or give a new folder, e.g. --workdir={folder}-2' in line
    config['model']['width'] = 16
    folder.write_json('config', config)
    (folder.path / 'environment.json').unlink()
    with pytest.raises(UserError, match=r'has the unknown fields model\.width_of_old; .* commit None'):
        folder.check_spec(tiny())


def test_a_run_of_before_a_field_came_has_what_it_then_was(folder):
    config = folder.read_json('config')
    for part, name in ((part, name) for part, later in DEFAULTS_FOR_OLD_CONFIGS.items() for name in later):
        del config[part][name]
    (folder.path / 'config.json').write_text(json.dumps(config))
    folder.check_spec(tiny())
    assert folder.list_changes(tiny()) == []
    assert parse_config(folder.read_json('config')) == tiny()
    with pytest.raises(UserError, match=r'contains another run \(model.kv_heads None -> 2\)'):
        folder.check_spec(tiny(model__kv_heads=2))


def test_what_came_later_is_what_is_usual():
    """Until a usual value changes, which then is another than that of older runs."""
    config = flatten_dict(tiny_config().to_dict())
    assert {name: config[name] for name in flatten_dict(DEFAULTS_FOR_OLD_CONFIGS)} == flatten_dict(
        DEFAULTS_FOR_OLD_CONFIGS
    )


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({}, []),
        (dict(probe__every_steps=4, probe__length=8), ['probe.every_steps 0 -> 4', 'probe.length 12 -> 8']),
        (dict(log__every_steps=2, valid__windows=5), ['valid.windows 6 -> 5', 'log.every_steps 1 -> 2']),
        (dict(checkpoint__keep=9), ['checkpoint.keep 3 -> 9']),
        (dict(optimizer__steps=20), ['optimizer.steps 8 -> 20']),
    ],
)
def test_what_touches_no_number_may_change_and_is_named(folder, changes, said):
    folder.check_spec(tiny(**changes))
    assert sorted(folder.list_changes(tiny(**changes))) == sorted(said)


@pytest.mark.parametrize(
    'part', [field.name for field in dataclasses.fields(Spec) if field.name not in CHANGEABLE_FIELDS]
)
def test_nothing_else_may_change(folder, part):
    changes = dict(model=dict(model__norm='post'), optimizer=dict(optimizer__weight_decay=0.3), seed=dict(seed=1))
    changes |= dict(data=dict(data__seed=1), log=dict(log__rows=True), probe=dict(probe__keys=2))
    with pytest.raises(UserError, match=f'contains another run \\({part}'):
        folder.check_spec(tiny(**changes[part]))


def test_fewer_steps_than_are_done_are_refused(folder):
    with pytest.raises(UserError, match=r'is at step 8, but config\.optimizer\.steps is 7; give at least 8'):
        folder.check_spec(tiny(optimizer__steps=7))


def test_more_steps_of_a_schedule_that_ends_are_refused_with_the_fork_to_give(tmp_path):
    folder, cosine = RunDir(tmp_path / "an o'dd run"), dict(optimizer__schedule='cosine', optimizer__final_share=0.1)
    folder.initialize(tiny(**cosine), {})
    with pytest.raises(UserError) as refusal:
        folder.check_spec(tiny(**cosine, optimizer__steps=20))
    assert shlex.split(str(refusal.value).partition('give a new folder: ')[2]) == [f'--workdir={folder}-2']
    (folder.checkpoint_dir / '8').mkdir(parents=True)
    with pytest.raises(UserError, match='has a run of 8 steps, but 20 change every step of a cosine') as refusal:
        folder.check_spec(tiny(**cosine, optimizer__steps=20))
    options = [f'--from={folder}@8', '--config.optimizer.steps=20', f'--workdir={folder}-2']
    assert shlex.split(str(refusal.value).partition('fork it: ')[2]) == options


@pytest.mark.parametrize('name', ['a\nb', 'a\tb', 'a\x7f', 'a\x1b[2J', 'a\x85b'])
def test_a_name_with_a_control_character_is_refused_in_one_line(name):
    with pytest.raises(UserError, match='has a control character') as refusal:
        RunDir(name)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize('name', ['a b', 'a"b', "a'b", 'a;b', 'Größe', 'x/../a', 'a@5'])
def test_other_names_are_names(tmp_path, name):
    (tmp_path / 'x').mkdir()
    folder = RunDir(f'{tmp_path}/{name}')
    folder.initialize(tiny(), {})
    folder.check_spec(tiny())


@pytest.mark.parametrize('name', ['lease.json', 'processes', 'digests', 'damaged', 'probe', 'x.unfinished'])
def test_what_a_job_leaves_before_its_config_is_no_stranger(tmp_path, name):
    (tmp_path / name).touch()
    RunDir(tmp_path).check_spec(tiny())
