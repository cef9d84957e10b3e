"""The flag --from=RUN@STEP of sinklab train."""

import json
import os
import shutil

import pytest
from runs import saved
from thread_group import alike

from sinklab.checkpoint import digests
from sinklab.cli import train
from sinklab.cli.config_flags import load_run_config, load_spec
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.process_group import SingleProcessGroup
from sinklab.run_dir import RunDir

SIGMOID = ['--config.model.attention.similarity=sigmoid', '--config.model.attention.normalizer=none']


@pytest.fixture(scope='module')
def config(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp('config') / 'mine.py'
    path.write_text(
        f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n'
        'from conftest import tiny_config\n'
        f'def get_config(row=None):\n    return tiny_config(data__source={corpus!r}, checkpoint__every_steps=4)\n'
    )
    return path


@pytest.fixture(scope='module')
def parent(config, tmp_path_factory):
    path = tmp_path_factory.mktemp('run') / "a @ 'run'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(config.parent / 'cache'))
        assert main(['train', f'--config={config}', f'--workdir={path}', '--compiled=none']) == 0
    return RunDir(path)


def forked(capsys, *arguments):
    code = main(['train', '--compiled=none', *arguments])
    return code, capsys.readouterr().err


@pytest.mark.slow
def test_fork_without_config_uses_parent_config_with_overrides(capsys, parent, tmp_path):
    given = [f'--from={parent}@4', f'--workdir={tmp_path}/fork', '--config.optimizer.clip_norm=0.5', *SIGMOID]
    code, said = forked(capsys, *given, '--config.model.mask.window=6')
    assert code == 0, said
    (line,) = (line for line in said.splitlines() if 'since step 4: from ' in line)
    for words in ('model.attention.similarity exp -> sigmoid', 'model.mask.window None -> 6', "a @ 'run'@4"):
        assert words in line
    folder = RunDir(tmp_path / 'fork')
    config = folder.read_json('config')
    assert (config['model']['mask']['window'], config['optimizer']['clip_norm']) == (6, 0.5)
    assert folder.read_json('row')['overrides']['model.mask.window'] == '6'
    assert folder.read_json('row')['row'] == 'fork'
    assert folder.read_lineage()['commit'] == parent.read_environment()['commit']
    assert [record['step'] for record in folder.read_records()] == [4, 5, 6, 7, 8]


@pytest.mark.slow
def test_fork_resumes_without_parent(capsys, parent, tmp_path):
    shutil.copytree(parent.path, tmp_path / 'parent')
    given = [f'--from={tmp_path}/parent@4', f'--workdir={tmp_path}/fork', *SIGMOID]
    assert forked(capsys, *given)[0] == 0
    shutil.rmtree(tmp_path / 'parent')
    shutil.rmtree(tmp_path / 'fork' / 'checkpoints' / '8')
    code, said = forked(capsys, *given)
    assert code == 0, said
    assert RunDir(tmp_path / 'fork').list_checkpoint_steps() == [4, 8]
    code, said = forked(capsys, f'--from={tmp_path}/parent@8', *given[1:])
    assert (code, len(said.splitlines())) == (1, 1)
    assert f' {tmp_path}/parent@4' in said
    assert f'--from={tmp_path}/parent@8' in said


@pytest.mark.slow
def test_fork_without_step_starts_at_newest_checkpoint(capsys, parent, tmp_path):
    given = [f'--from={parent}', f'--workdir={tmp_path}/fork', '--config.optimizer.steps=10']
    assert forked(capsys, *given)[0] == 0
    assert RunDir(tmp_path / 'fork').read_lineage()['step'] == 8
    assert train.resolve_parent(str(parent), RunDir(tmp_path / 'fork'), SingleProcessGroup()).step == 8


def made(path, *steps, lineage=None):
    """Make a run folder with empty checkpoints."""
    for step in steps:
        (path / 'checkpoints' / str(step)).mkdir(parents=True)
    path.mkdir(exist_ok=True)
    (path / 'config.json').write_text('{}')
    (path / 'row.json').write_text(json.dumps({'from': lineage} if lineage else {}))
    return path


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        ('nothing@4', 'contains no run; give a run folder'),
        ('empty', 'has no checkpoints; give'),
        ('run@5', 'has no checkpoint 5; it has: 2, 4'),
        ('child', 'is also the --workdir'),
        ('child/../child@4', 'is also the --workdir'),
        ('params:', r'--from=params: names no run; give --from=params:RUN@STEP'),
        ('params:nothing@4', r'nothing contains no run; give a run folder, and a step: --from=params:RUN@STEP'),
        ('params:run@5', 'has no checkpoint 5; it has: 2, 4'),
        ('params:child', r'--from=params:child is also the --workdir'),
        ('parms:run@4', 'parms:run contains no run'),
    ],
)
def test_resolve_parent_refuses_invalid_checkpoint(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / 'run', 2, 4)
    made(tmp_path / 'empty')
    with pytest.raises(UserError, match=words):
        train.resolve_parent(given, RunDir('child'), SingleProcessGroup())


def test_resolve_parent_refuses_existing_run_that_is_no_fork(tmp_path):
    made(tmp_path / 'run', 4)
    with pytest.raises(UserError, match=f'{tmp_path}/child .*fork'):
        train.resolve_parent(f'{tmp_path}/run@4', RunDir(made(tmp_path / 'child', 4)), SingleProcessGroup())


def test_resolve_parent_finds_moved_parent_by_digest(tmp_path):
    saved(RunDir(made(tmp_path / 'run')), 2, 4)
    saved(RunDir(made(tmp_path / 'other')), 4, content=b'of another run')
    lineage = dict(run='../run', step=4, seal=digests.compute_checkpoint_digest(RunDir(tmp_path / 'run'), 4))
    child = RunDir(made(tmp_path / 'child', lineage=lineage))
    (tmp_path / 'run').rename(tmp_path / 'moved')
    for given in ('moved', 'moved@4', 'run@4'):
        assert train.resolve_parent(f'{tmp_path}/{given}', child, SingleProcessGroup()).step == 4
    for given in ('moved@2', 'other@4', 'nowhere@4'):
        with pytest.raises(UserError, match=rf'/run@4.* --from=.*{given}'):
            train.resolve_parent(f'{tmp_path}/{given}', child, SingleProcessGroup())


def test_resolve_parent_accepts_folder_name_with_at_sign(tmp_path):
    made(tmp_path / 'run@5', 2, 4)
    for given, step in (('run@5', 4), ('run@5@2', 2)):
        parent = train.resolve_parent(f'{tmp_path}/{given}', RunDir(tmp_path / 'child'), SingleProcessGroup())
        assert (parent.run_dir.path, parent.step) == (tmp_path / 'run@5', step)


def test_resolve_parent_splits_prefix_at_first_colon(tmp_path):
    run = made(tmp_path / 'a:run', 2, 4)
    for given, takes, step in (('params:', 'params', 4), ('', '', 4), ('params:', 'params', 2)):
        parent = train.resolve_parent(f'{given}{run}@{step}', RunDir(tmp_path / 'child'), SingleProcessGroup())
        assert (parent.run_dir.path, parent.step, parent.takes) == (run, step, takes)


def test_resolve_parent_requires_params_prefix_for_parameter_fork(tmp_path):
    run = RunDir(made(tmp_path / 'run'))
    saved(run, 4)
    lineage = dict(run='../run', step=4, seal=digests.compute_checkpoint_digest(run, 4), takes='params', start=0)
    child, moved = RunDir(made(tmp_path / 'child', lineage=lineage)), tmp_path / 'moved'
    run.path.rename(moved)
    assert train.resolve_parent(f'params:{moved}', child, SingleProcessGroup()).step == 4
    words = rf'fork of params:.*/run@4, and --from={moved} takes another part of it; give --from=params:.*@4'
    with pytest.raises(UserError, match=words):
        train.resolve_parent(f'{moved}', child, SingleProcessGroup())


def of_each(tmp_path, *given):
    """Return the parent that each of two processes resolves from its --from."""
    return alike(2, lambda group: train.resolve_parent(given[group.index], RunDir(tmp_path / 'child'), group))


def test_resolve_parent_uses_step_of_process_0(tmp_path):
    seen = [made(tmp_path / 'here', 2, 4), made(tmp_path / 'there', 2)]
    parents = of_each(tmp_path, *map(str, seen))
    assert [(parent.run_dir.path, parent.step) for parent in parents] == [(path, 4) for path in seen]
    assert [parent.step for parent in of_each(tmp_path, str(seen[0]), f'{seen[1]}@4')] == [4, 4]


def test_resolve_parent_refuses_different_prefixes_across_processes(tmp_path):
    run = made(tmp_path / 'run', 2, 4)
    words = 'process 1 differs from process 0 in --from: step 4 instead of params of step 4'
    assert [words in str(refusal) for refusal in of_each(tmp_path, f'params:{run}', str(run))] == [True, True]


@pytest.mark.parametrize(('one', 'other'), [('@4', '@2'), ('', '@2'), ('@4', None), (None, '@4'), (None, '')])
def test_resolve_parent_refuses_different_steps_across_processes(tmp_path, one, other):
    run = made(tmp_path / 'run', 2, 4)
    said = of_each(tmp_path, *(step if step is None else f'{run}{step}' for step in (one, other)))
    assert [type(refusal) for refusal in said] == [UserError, UserError]
    assert all(word in str(refusal) for refusal in said for word in ('process 1', 'process 0', '--from'))


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ([], 'neither --config nor --from is given'),
        (['--from={run}@4', '--size=smoke'], '--size=smoke is for a row of --config'),
        (['--from={run}@4'], 'contains a run of another version (config.model, config.optimizer'),
    ],
)
def test_train_refuses_invalid_fork_flags_with_one_line(capsys, tmp_path, arguments, words):
    run = made(tmp_path / 'run', 4)
    code, said = forked(capsys, f'--workdir={tmp_path}/new', *(given.format(run=run) for given in arguments))
    assert (code, len(said.splitlines())) == (1, 1)
    assert words in said
    assert not (tmp_path / 'new').exists()


def test_load_run_config_keeps_published_values_only_for_same_results(tmp_path):
    spec, row = load_spec('configs/quickstart.py:softmax', ['--config.optimizer.steps=200'])
    folder = RunDir(tmp_path)
    folder.initialize(spec, row)
    same, about = load_run_config(folder, 'again', ['--config.probe.every_steps=50'])
    assert (same.probe.every_steps, about['published'], about['row']) == (50, row['published'], 'again')
    assert about['overrides'] == {'probe.every_steps': '50'}
    other, about = load_run_config(folder, 'other', ['--config.seed=3'])
    assert (other.seed, about['published'], about['source']) == (3, {}, '')
