"""The flag --from=RUN@STEP of sinklab train."""

import json
import os
import shutil

import pytest
from thread_group import run_group
from tiny_runs import write_checkpoints

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
        'from conftest import make_tiny_config\n'
        'def get_config(row=None):\n'
        f'    return make_tiny_config(data__source={corpus!r}, checkpoint__every_steps=4)\n'
    )
    return path


@pytest.fixture(scope='module')
def parent(config, tmp_path_factory):
    path = tmp_path_factory.mktemp('run') / "a @ 'run'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(config.parent / 'cache'))
        assert main(['train', f'--config={config}', f'--workdir={path}', '--compiled=none']) == 0
    return RunDir(path)


def run_train(capsys, *arguments):
    exit_code = main(['train', '--compiled=none', *arguments])
    return exit_code, capsys.readouterr().err


@pytest.mark.slow
def test_fork_without_config_uses_parent_config_with_overrides(capsys, parent, tmp_path):
    arguments = [f'--from={parent}@4', f'--workdir={tmp_path}/fork', '--config.optimizer.clip_norm=0.5', *SIGMOID]
    exit_code, stderr = run_train(capsys, *arguments, '--config.model.mask.window=6')
    assert exit_code == 0, stderr
    (line,) = (line for line in stderr.splitlines() if 'since step 4: from ' in line)
    for text in ('model.attention.similarity exp -> sigmoid', 'model.mask.window None -> 6', "a @ 'run'@4"):
        assert text in line
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
    arguments = [f'--from={tmp_path}/parent@4', f'--workdir={tmp_path}/fork', *SIGMOID]
    assert run_train(capsys, *arguments)[0] == 0
    shutil.rmtree(tmp_path / 'parent')
    shutil.rmtree(tmp_path / 'fork' / 'checkpoints' / '8')
    exit_code, stderr = run_train(capsys, *arguments)
    assert exit_code == 0, stderr
    assert RunDir(tmp_path / 'fork').list_checkpoint_steps() == [4, 8]
    exit_code, stderr = run_train(capsys, f'--from={tmp_path}/parent@8', *arguments[1:])
    assert (exit_code, len(stderr.splitlines())) == (1, 1)
    assert f' {tmp_path}/parent@4' in stderr
    assert f'--from={tmp_path}/parent@8' in stderr


@pytest.mark.slow
def test_fork_without_step_starts_at_newest_checkpoint(capsys, parent, tmp_path):
    arguments = [f'--from={parent}', f'--workdir={tmp_path}/fork', '--config.optimizer.steps=10']
    assert run_train(capsys, *arguments)[0] == 0
    assert RunDir(tmp_path / 'fork').read_lineage()['step'] == 8
    assert train.resolve_parent(str(parent), RunDir(tmp_path / 'fork'), SingleProcessGroup()).step == 8


def make_run_folder(path, *steps, lineage=None):
    """Make a run folder with empty checkpoints."""
    for step in steps:
        (path / 'checkpoints' / str(step)).mkdir(parents=True)
    path.mkdir(exist_ok=True)
    (path / 'config.json').write_text('{}')
    (path / 'row.json').write_text(json.dumps({'from': lineage} if lineage else {}))
    return path


@pytest.mark.parametrize(
    ('from_flag', 'pattern'),
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
def test_resolve_parent_refuses_invalid_checkpoint(tmp_path, monkeypatch, from_flag, pattern):
    monkeypatch.chdir(tmp_path)
    make_run_folder(tmp_path / 'run', 2, 4)
    make_run_folder(tmp_path / 'empty')
    with pytest.raises(UserError, match=pattern):
        train.resolve_parent(from_flag, RunDir('child'), SingleProcessGroup())


def test_resolve_parent_refuses_existing_run_that_is_no_fork(tmp_path):
    make_run_folder(tmp_path / 'run', 4)
    with pytest.raises(UserError, match=f'{tmp_path}/child .*fork'):
        train.resolve_parent(
            f'{tmp_path}/run@4', RunDir(make_run_folder(tmp_path / 'child', 4)), SingleProcessGroup()
        )


def test_resolve_parent_finds_moved_parent_by_digest(tmp_path):
    write_checkpoints(RunDir(make_run_folder(tmp_path / 'run')), 2, 4)
    write_checkpoints(RunDir(make_run_folder(tmp_path / 'other')), 4, content=b'of another run')
    lineage = dict(run='../run', step=4, seal=digests.compute_checkpoint_digest(RunDir(tmp_path / 'run'), 4))
    child = RunDir(make_run_folder(tmp_path / 'child', lineage=lineage))
    (tmp_path / 'run').rename(tmp_path / 'moved')
    for name in ('moved', 'moved@4', 'run@4'):
        assert train.resolve_parent(f'{tmp_path}/{name}', child, SingleProcessGroup()).step == 4
    for name in ('moved@2', 'other@4', 'nowhere@4'):
        with pytest.raises(UserError, match=rf'/run@4.* --from=.*{name}'):
            train.resolve_parent(f'{tmp_path}/{name}', child, SingleProcessGroup())


def test_resolve_parent_accepts_folder_name_with_at_sign(tmp_path):
    make_run_folder(tmp_path / 'run@5', 2, 4)
    for name, step in (('run@5', 4), ('run@5@2', 2)):
        parent = train.resolve_parent(f'{tmp_path}/{name}', RunDir(tmp_path / 'child'), SingleProcessGroup())
        assert (parent.run_dir.path, parent.step) == (tmp_path / 'run@5', step)


def test_resolve_parent_splits_prefix_at_first_colon(tmp_path):
    run = make_run_folder(tmp_path / 'a:run', 2, 4)
    for prefix, takes, step in (('params:', 'params', 4), ('', '', 4), ('params:', 'params', 2)):
        parent = train.resolve_parent(f'{prefix}{run}@{step}', RunDir(tmp_path / 'child'), SingleProcessGroup())
        assert (parent.run_dir.path, parent.step, parent.takes) == (run, step, takes)


def test_resolve_parent_requires_params_prefix_for_parameter_fork(tmp_path):
    run = RunDir(make_run_folder(tmp_path / 'run'))
    write_checkpoints(run, 4)
    lineage = dict(run='../run', step=4, seal=digests.compute_checkpoint_digest(run, 4), takes='params', start=0)
    child, moved_path = RunDir(make_run_folder(tmp_path / 'child', lineage=lineage)), tmp_path / 'moved'
    run.path.rename(moved_path)
    assert train.resolve_parent(f'params:{moved_path}', child, SingleProcessGroup()).step == 4
    message_pattern = (
        rf'fork of params:.*/run@4, and --from={moved_path} takes another part of it; give --from=params:.*@4'
    )
    with pytest.raises(UserError, match=message_pattern):
        train.resolve_parent(f'{moved_path}', child, SingleProcessGroup())


def resolve_in_two_processes(tmp_path, *sources):
    """Return the parent that each of two processes resolves from its --from."""
    return run_group(
        2, lambda group: train.resolve_parent(sources[group.process_index], RunDir(tmp_path / 'child'), group)
    )


def test_resolve_parent_uses_step_of_process_0(tmp_path):
    paths = [make_run_folder(tmp_path / 'here', 2, 4), make_run_folder(tmp_path / 'there', 2)]
    parents = resolve_in_two_processes(tmp_path, *map(str, paths))
    assert [(parent.run_dir.path, parent.step) for parent in parents] == [(path, 4) for path in paths]
    assert [parent.step for parent in resolve_in_two_processes(tmp_path, str(paths[0]), f'{paths[1]}@4')] == [4, 4]


def test_resolve_parent_refuses_different_prefixes_across_processes(tmp_path):
    run = make_run_folder(tmp_path / 'run', 2, 4)
    message = 'process 1 differs from process 0 in --from: step 4 instead of params of step 4'
    assert [message in str(error) for error in resolve_in_two_processes(tmp_path, f'params:{run}', str(run))] == [
        True,
        True,
    ]


@pytest.mark.parametrize(('first', 'second'), [('@4', '@2'), ('', '@2'), ('@4', None), (None, '@4'), (None, '')])
def test_resolve_parent_refuses_different_steps_across_processes(tmp_path, first, second):
    run = make_run_folder(tmp_path / 'run', 2, 4)
    errors = resolve_in_two_processes(
        tmp_path, *(step if step is None else f'{run}{step}' for step in (first, second))
    )
    assert [type(error) for error in errors] == [UserError, UserError]
    assert all(text in str(error) for error in errors for text in ('process 1', 'process 0', '--from'))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'neither --config nor --from is given'),
        (['--from={run}@4', '--size=smoke'], '--size=smoke is for a row of --config'),
        (['--from={run}@4'], 'contains a run of another version (config.model, config.optimizer'),
    ],
)
def test_train_refuses_invalid_fork_flags_with_one_line(capsys, tmp_path, arguments, message):
    run = make_run_folder(tmp_path / 'run', 4)
    exit_code, stderr = run_train(
        capsys, f'--workdir={tmp_path}/new', *(argument.format(run=run) for argument in arguments)
    )
    assert (exit_code, len(stderr.splitlines())) == (1, 1)
    assert message in stderr
    assert not (tmp_path / 'new').exists()


def test_load_run_config_keeps_published_values_only_for_same_results(tmp_path):
    spec, row = load_spec('configs/quickstart.py:softmax', ['--config.optimizer.steps=200'])
    folder = RunDir(tmp_path)
    folder.initialize(spec, row)
    same_spec, new_row = load_run_config(folder, 'again', ['--config.probe.every_steps=50'])
    assert (same_spec.probe.every_steps, new_row['published'], new_row['row']) == (50, row['published'], 'again')
    assert new_row['overrides'] == {'probe.every_steps': '50'}
    other_spec, new_row = load_run_config(folder, 'other', ['--config.seed=3'])
    assert (other_spec.seed, new_row['published'], new_row['source']) == (3, {}, '')
