"""The flag --from=RUN@STEP of sinklab train."""

import json
import shutil

import pytest
from commands import write_config
from tiny_specs import make_tiny_spec

from sinklab.cli import hf, train
from sinklab.cli.main import main
from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train.warm_start import WarmStart

SIGMOID = ['--config.model.attention.similarity=sigmoid', '--config.model.attention.normalizer=none']


@pytest.fixture(scope='module')
def config(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp('config') / 'mine.py'
    write_config(path, data__source=corpus, checkpoint__every_steps=4)
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
    assert folder.read_parent()['commit'] == parent.read_environment()['commit']
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
    assert f'--from={tmp_path}/parent@4' in stderr
    assert f'--from={tmp_path}/parent@8' in stderr


def make_run_folder(path, *steps, parent=None):
    """Make a run folder with empty checkpoints."""
    for step in steps:
        (path / 'checkpoints' / str(step)).mkdir(parents=True)
    path.mkdir(exist_ok=True)
    (path / 'config.json').write_text('{}')
    (path / 'row.json').write_text(json.dumps({'from': parent} if parent else {}))
    return path


@pytest.mark.parametrize(
    ('from_flag', 'pattern'),
    [
        ('nothing@4', 'nothing does not exist; give the folder of a run'),
        ('empty', 'has no checkpoints; give'),
        ('run@5', 'has no checkpoint 5; it has: 2, 4'),
        ('child', 'is also the --workdir'),
        ('child/../child@4', 'is also the --workdir'),
        ('params:', r'--from=params: names no run; give --from=params:RUN@STEP'),
        ('params:nothing@4', 'nothing does not exist; give the folder of a run'),
        ('params:run@5', 'has no checkpoint 5; it has: 2, 4'),
        ('params:child', r'--from=params:child is also the --workdir'),
        ('parms:run@4', 'parms:run does not exist'),
    ],
)
def test_resolve_parent_refuses_invalid_checkpoint(tmp_path, monkeypatch, from_flag, pattern):
    monkeypatch.chdir(tmp_path)
    make_run_folder(tmp_path / 'run', 2, 4)
    make_run_folder(tmp_path / 'empty')
    with pytest.raises(UserError, match=pattern):
        train.resolve_parent(from_flag, RunDir('child'))


def test_resolve_parent_refuses_existing_run_that_is_no_fork(tmp_path):
    make_run_folder(tmp_path / 'run', 4)
    with pytest.raises(UserError, match=f'{tmp_path}/child .*warm start'):
        train.resolve_parent(f'{tmp_path}/run@4', RunDir(make_run_folder(tmp_path / 'child', 4)))


@pytest.mark.parametrize('takes', ['', 'params:'])
def test_existing_fork_accepts_only_the_checkpoint_that_it_records(tmp_path, takes):
    make_run_folder(tmp_path / 'run', 2, 4)
    parent = dict(run='../run', step=2, takes=takes.removesuffix(':'))
    child = RunDir(make_run_folder(tmp_path / 'child', parent=parent))
    for name in ('run', 'run@2'):
        assert train.resolve_parent(f'{takes}{tmp_path}/{name}', child)[2] == 2
    other_takes = '' if takes else 'params:'
    for from_flag in (f'{takes}{tmp_path}/run@4', f'{takes}{tmp_path}/other@2', f'{other_takes}{tmp_path}/run@2'):
        with pytest.raises(UserError, match=f'--from={takes}{tmp_path}/run@2'):
            train.resolve_parent(from_flag, child)


def test_resolve_parent_splits_prefix_at_first_colon(tmp_path):
    run = make_run_folder(tmp_path / 'a:run', 2, 4)
    for prefix, takes, step in (('params:', 'params', 4), ('', '', 4), ('params:', 'params', 2)):
        resolved_takes, parent, resolved_step = train.resolve_parent(
            f'{prefix}{run}@{step}', RunDir(tmp_path / 'child')
        )
        assert (parent.path, resolved_step, resolved_takes) == (run, step, takes)


def test_existing_child_of_open_model_does_not_need_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    imports_root = (tmp_path / 'cache' / 'imports').resolve()
    parent = dict(run='../cache/imports/llama-0123.3', step=0, takes='params')
    child = RunDir(make_run_folder(tmp_path / 'child', parent=parent))
    assert hf.resolve_from_flag('hf:moved/llama', child) == f'params:{imports_root}/llama-0123.3@0'
    with pytest.raises(UserError, match='moved/gemma'):
        hf.resolve_from_flag('hf:moved/gemma', child)


def test_takes_and_step_of_from_flag_must_be_equal_on_all_processes():
    spec = make_tiny_spec()
    parents = [WarmStart(RunDir('run'), 4, spec, 'params'), WarmStart(RunDir('run'), 2, spec), None]
    settings = [train.collect_shared_settings(spec, Layout(), parent)['--from'] for parent in parents]
    assert settings == [['params', 4], ['', 2], None]
