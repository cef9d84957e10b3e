"""Tests of the run folder: metrics, config checks and names."""

import dataclasses
import json

import pytest
from tiny_runs import write_checkpoints
from tiny_specs import make_tiny_spec

from sinklab.config.spec import CHANGEABLE_FIELDS, Layout, Spec
from sinklab.errors import UserError
from sinklab.run_dir import MetricsWriter, RunDir, check_run_dir, list_changes, parse_run_ref, read_spec
from sinklab.storage.files import DamagedFileError
from sinklab.storage.paths import parse_path
from sinklab.sweep import plan


@pytest.fixture
def folder(tmp_path):
    """Make the folder of a run whose 8 steps are done."""
    folder, spec = RunDir(tmp_path / 'run'), make_tiny_spec()
    folder.initialize(spec, dict(row='tiny'))
    write_checkpoints(folder, 8)
    records = [{'step': step, 'seconds': 1.0, 'valid/loss': loss} for step, loss in ((0, 5.9), (8, 5.1))]
    (folder.path / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    return folder


@pytest.fixture(params=['disk', pytest.param('gs', marks=pytest.mark.slow)])
def empty_folder(request, tmp_path):
    return RunDir(tmp_path if request.param == 'disk' else f'{request.getfixturevalue("bucket").url}/run')


def write_records(folder, resume_step, records):
    writer = MetricsWriter(folder, resume_step)
    for record in records:
        writer.append(record)
    writer.close()


def test_lines_after_resumed_step_are_dropped(empty_folder):
    write_records(empty_folder, 0, [dict(step=step, loss=0.1 * step) for step in range(6)])
    write_records(empty_folder, 3, [dict(step=3, sink=0.5), dict(step=4, loss=9.0)])
    records = empty_folder.read_records()
    assert [record['step'] for record in records] == [0, 1, 2, 3, 4]
    assert records[3] == dict(step=3, loss=0.1 * 3, sink=0.5)
    assert records[4]['loss'] == 9.0


def test_run_without_row_json_is_refused_instead_of_losing_its_parent(tmp_path):
    folder = RunDir(tmp_path)
    assert folder.read_parent() == {}
    folder.initialize(make_tiny_spec(), {'from': dict(run='../parent', step=4)})
    assert folder.read_parent()['step'] == 4
    (tmp_path / 'row.json').unlink()
    with pytest.raises(UserError, match=r'row\.json'):
        folder.read_parent()


def test_copy_of_metrics_is_uploaded_at_saves_and_at_end(bucket):
    folder = RunDir(f'{bucket.url}/run')
    writer = MetricsWriter(folder, 0)
    writer.append(dict(step=1))
    assert folder.read_records() == []
    writer.upload()
    writer.append(dict(step=2))
    assert [record['step'] for record in folder.read_records()] == [1]
    writer.close()
    assert [record['step'] for record in folder.read_records()] == [1, 2]


def test_truncated_last_line_is_ignored_and_damaged_line_is_named(folder, capsys):
    path = folder.path / 'metrics.jsonl'
    path.write_bytes(path.read_bytes() + b'{"step": 9, "lo')
    assert [record['step'] for record in folder.read_records()] == [0, 8]
    assert capsys.readouterr().err == ''
    path.write_bytes(b'{"step": "x"}\n' + path.read_bytes())
    assert [record['step'] for record in folder.read_records()] == [0, 8]
    assert f'{path}, line 1' in capsys.readouterr().err


@pytest.mark.parametrize('damage', ['metrics', 'digests'])
def test_run_without_last_metrics_or_digests_is_not_done(folder, damage):
    def find_outcome():
        run = plan.SweepRun('softmax', 0, folder, None, make_tiny_spec())
        plan.check_run(run, Layout())
        return run.outcome

    assert find_outcome() == 'done'
    if damage == 'metrics':
        path = folder.path / 'metrics.jsonl'
        path.write_bytes(path.read_bytes()[:-20])
    else:
        (folder.checkpoint_dir / '8' / 'digests_0.json').unlink()
    assert find_outcome() == 'to do'


def test_damaged_config_is_named(folder):
    check_run_dir(folder, make_tiny_spec())
    (folder.path / 'config.json').write_text('{"a":')
    with pytest.raises(DamagedFileError, match=r'config\.json'):
        check_run_dir(folder, make_tiny_spec())


def test_run_of_other_version_is_refused_with_its_commit(folder):
    config = folder.read_json('config')
    config['model']['width_of_old'] = config['model'].pop('width')
    folder.write_json('config', config)
    folder.write_json('environment', dict(commit='0123abc', attempts=[]))
    for check in (lambda: check_run_dir(folder, make_tiny_spec()), lambda: read_spec(folder)):
        with pytest.raises(UserError, match=r'model\.width_of_old.*0123abc') as error:
            check()
        assert len(str(error.value).splitlines()) == 1


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
def test_changeable_fields_are_accepted_and_listed(folder, changes, expected):
    check_run_dir(folder, make_tiny_spec(**changes))
    assert sorted(list_changes(folder, make_tiny_spec(**changes))) == sorted(expected)


@pytest.mark.parametrize(
    'part', [field.name for field in dataclasses.fields(Spec) if field.name not in CHANGEABLE_FIELDS]
)
def test_changes_of_other_fields_are_refused(folder, part):
    changes = dict(model=dict(model__norm='post'), optimizer=dict(optimizer__weight_decay=0.3), seed=dict(seed=1))
    changes |= dict(data=dict(data__seed=1), log=dict(log__sinks=True), probe=dict(probe__keys=2))
    with pytest.raises(UserError, match=f'\\({part}'):
        check_run_dir(folder, make_tiny_spec(**changes[part]))


def test_fewer_steps_than_done_are_refused(folder):
    with pytest.raises(UserError, match=r'step 8.*config\.optimizer\.steps.* 7.*at least 8'):
        check_run_dir(folder, make_tiny_spec(optimizer__steps=7))


def test_more_steps_of_cosine_are_refused(tmp_path):
    folder = RunDir(tmp_path / 'run')
    cosine_changes = dict(optimizer__schedule='cosine', optimizer__final_share=0.1)
    folder.initialize(make_tiny_spec(**cosine_changes), {})
    with pytest.raises(UserError, match=r' 8 -> 20.*cosine.*--from'):
        check_run_dir(folder, make_tiny_spec(**cosine_changes, optimizer__steps=20))


def test_folder_with_other_files_is_refused(tmp_path):
    for name in ('run.lock', 'owner.json', 'probe', 'x.unfinished'):  # of an attempt that was interrupted early
        (tmp_path / name).touch()
    check_run_dir(RunDir(tmp_path), make_tiny_spec())
    (tmp_path / 'thesis.tex').touch()
    with pytest.raises(UserError, match=r'thesis\.tex'):
        check_run_dir(RunDir(tmp_path), make_tiny_spec())


def test_step_of_reference_is_split_off_unless_it_belongs_to_the_name(tmp_path):
    RunDir(tmp_path / 'a@5').initialize(make_tiny_spec(), {})
    assert parse_run_ref(f'{tmp_path}/a@7')[1] == 7
    run_dir, step = parse_run_ref(f'{tmp_path}/a@5')
    assert (run_dir.path, step) == (parse_path(tmp_path / 'a@5'), None)
