"""Run ids: rejection of checkpoints and digests of other runs."""

import json
import shutil

import jax.numpy as jnp
import pytest
from conftest import make_tiny_spec
from thread_group import run_group
from tiny_runs import make_spec, train_run

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint import checkpointer as checkpointer_module
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.checkpoint.digests import RUN_ID_KEY
from sinklab.cli.main import main
from sinklab.config.spec import Hardware
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import atomic_write as files
from sinklab.train import loop, warm_start

CHECKPOINT_CONFIG = make_tiny_spec().checkpoint


@pytest.fixture(autouse=True)
def immediate_visibility(monkeypatch):
    """Make written files visible without delay."""
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.0)


def make_run(path, value=0.0, has_id=True):
    """Return a run with checkpoints 2 and 4, whose parameters equal `value`."""
    folder = RunDir(path)
    folder.initialize(make_tiny_spec(), {})
    if not has_id:
        delete_run_id(folder)
    checkpoints = Checkpointer(folder, CHECKPOINT_CONFIG, {})
    for step in (2, 4):
        checkpoints.save(step, dict(step=jnp.int32(step), params=dict(w=jnp.full(3, value))))
    checkpoints.close()
    return folder


def delete_run_id(folder):
    """Delete run.json. Older versions wrote runs without this file."""
    (folder.path / 'run.json').unlink()


def replace_checkpoint(source, target, step=4):
    """Replace a checkpoint and its digests with those of another run."""
    for kind in ('checkpoints', 'digests'):
        shutil.rmtree(target.path / kind / str(step))
        shutil.copytree(source.path / kind / str(step), target.path / kind / str(step))


def test_runs_of_same_config_have_different_ids_in_checkpoints(tmp_path):
    run, other_run = make_run(tmp_path / 'ours'), make_run(tmp_path / 'theirs')
    assert run.read_run_id() != other_run.read_run_id()
    assert run.read_json('config') == other_run.read_json('config')
    for folder in (run, other_run):
        assert json.loads(digests.get_digest_path(folder, 4, 0).read_text())[RUN_ID_KEY] == folder.read_run_id()
        assert digests.find_corruption(folder, 4) is None


@pytest.mark.parametrize(('run', 'other_run'), [(True, True), (True, False)])
def test_checkpoint_of_another_run_is_named_and_quarantined(tmp_path, run, other_run):
    run, other_run = make_run(tmp_path / 'ours', 1.0, run), make_run(tmp_path / 'theirs', 2.0, other_run)
    replace_checkpoint(other_run, run)
    checkpoints = Checkpointer(run, CHECKPOINT_CONFIG, {})
    newest_step, (line,) = checkpoints.find_latest_valid_step()
    checkpoints.close()
    assert newest_step == 2
    assert (other_run.read_run_id() or 'no id') in line
    assert str(run.read_run_id()) in line
    assert (run.quarantine_dir / '4' / 'checkpoint').is_dir()
    assert (run.quarantine_dir / '4' / 'digests' / '0.json').is_file()


def test_run_with_only_checkpoints_of_another_run_is_rejected_unchanged(tmp_path):
    run, other_run = make_run(tmp_path / 'ours'), make_run(tmp_path / 'theirs')
    for step in (2, 4):
        replace_checkpoint(other_run, run, step)
    with pytest.raises(UserError, match=other_run.read_run_id()):
        Checkpointer(run, CHECKPOINT_CONFIG, {}).find_latest_valid_step()
    assert run.list_checkpoint_steps() == [2, 4]


@pytest.mark.parametrize(
    'command', [['verify'], ['restore-params', '--out={out}']], ids=lambda arguments: arguments[0]
)
def test_reader_rejects_checkpoint_of_another_run_with_one_line(tmp_path, capsys, command):
    run, other_run = make_run(tmp_path / 'ours'), make_run(tmp_path / 'theirs')
    replace_checkpoint(other_run, run)
    verb, *options = (argument.format(out=tmp_path / 'out') for argument in command)
    assert main(['checkpoint', verb, f'{run}@4', *options]) == 1
    (line,) = ''.join(capsys.readouterr()).splitlines()
    assert run.read_run_id() in line
    assert other_run.read_run_id() in line
    assert not (tmp_path / 'out').exists()


def test_newest_step_ignores_checkpoint_of_another_run(tmp_path):
    run, other_run = make_run(tmp_path / 'ours'), make_run(tmp_path / 'theirs')
    replace_checkpoint(other_run, run)
    assert digests.find_newest_step(run) == 2
    (run.path / 'run.json').write_text('{')
    assert digests.find_newest_step(run) == 4  # the owner is unknown, and readers reject the checkpoint
    with pytest.raises(UserError, match=r'run\.json'):
        digests.find_corruption(run, 4)


def test_run_without_id_resumes_without_id(tmp_path):
    folder = make_run(tmp_path / 'run', has_id=False)
    assert folder.read_run_id() is None
    assert digests.find_corruption(folder, 4) is None
    checkpoints = Checkpointer(folder, CHECKPOINT_CONFIG, {})
    checkpoints.save(6, dict(step=jnp.int32(6), params=dict(w=jnp.zeros(3))))
    checkpoints.close()
    assert folder.read_run_id() is None
    assert digests.find_corruption(folder, 6) is None
    assert folder.list_checkpoint_steps() == [2, 4, 6]


def test_copied_or_moved_run_keeps_id_and_checkpoints(tmp_path):
    folder = make_run(tmp_path / 'run', 3.0)
    run_copy = RunDir(shutil.copytree(folder.path, tmp_path / 'copied'))
    moved_run = RunDir(shutil.move(folder.path, tmp_path / 'moved'))
    for run in (run_copy, moved_run):
        assert digests.find_corruption(run, 4) is None
        assert checkpointer_module.restore_parameters(run.path, 4)['w'][0] == 3


@pytest.mark.parametrize('content', ['', '[]', '5', '{}', '{"id": 5}', '{"id": ""}', '[' * 100_000, '\xff'], ids=len)
def test_malformed_run_json_is_rejected(tmp_path, content):
    folder = make_run(tmp_path / 'run')
    (folder.path / 'run.json').write_text(content, encoding='latin-1')
    with pytest.raises(UserError, match=r'run\.json'):
        folder.read_run_id()


@pytest.mark.parametrize('run_id', [5, '', [], {}], ids=str)
def test_digests_with_invalid_id_are_rejected(tmp_path, run_id):
    folder = make_run(tmp_path / 'run')
    file = digests.get_digest_path(folder, 4, 0)
    file.write_text(json.dumps(json.loads(file.read_text()) | {RUN_ID_KEY: run_id}))
    assert (
        'damaged' in digests.find_corruption(folder, 4).reason
        or 'another' in digests.find_corruption(folder, 4).reason
    )


def test_digests_of_one_process_with_another_id_are_rejected(tmp_path):
    folder = RunDir(tmp_path / 'run')
    folder.initialize(make_tiny_spec(), {})
    state = folder.checkpoint_dir / '4' / 'state'
    (state / 'ocdbt.process_1').mkdir(parents=True)
    for name in ('manifest.ocdbt', 'ocdbt.process_1/of_1'):
        (state / name).write_text(name)
    folder.digest_dir.mkdir()
    checkpointer.make_digest_dir(folder, 4)
    digests.write_digests(folder, 4, 0, 2, 1.0)
    digests.write_digests(folder, 4, 1, 2, 1.0, 'another')
    fault = digests.find_corruption(folder, 4)
    assert 'another' in fault.reason
    assert folder.read_run_id() in fault.reason
    assert not fault.is_incomplete


def test_missing_run_json_is_replaced_by_common_id_of_checkpoints(tmp_path, capsys):
    folder = make_run(tmp_path / 'run')
    run_id, content = folder.read_run_id(), (folder.path / 'run.json').read_bytes()
    delete_run_id(folder)
    checkpoints = Checkpointer(folder, CHECKPOINT_CONFIG, {})
    checkpoints.save(6, dict(step=jnp.int32(6), params=dict(w=jnp.zeros(3))))
    checkpoints.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder.path / 'run.json') in line
    assert run_id in line
    assert digests.read_digests(folder, 6).run_ids == {run_id}
    (folder.path / 'run.json').write_bytes(content)
    assert digests.find_corruption(folder, 6) is None


@pytest.mark.parametrize('other_has_id', [True, False])
def test_missing_run_json_with_different_ids_is_rejected_with_one_line(tmp_path, capsys, other_has_id):
    run, other_run = make_run(tmp_path / 'ours'), make_run(tmp_path / 'theirs', has_id=other_has_id)
    run_id = run.read_run_id()
    replace_checkpoint(other_run, run)
    delete_run_id(run)
    with pytest.raises(UserError, match=run_id) as error:
        Checkpointer(run, CHECKPOINT_CONFIG, {})
    assert (other_run.read_run_id() or 'no id') in str(error.value)
    for command in (['verify'], ['restore-params', f'--out={tmp_path}/out'], ['ls']):
        assert main(['checkpoint', command[0], f'{run}@4', *command[1:]]) == 1
        (line,) = ''.join(capsys.readouterr()).splitlines()
        assert str(run.path / 'run.json') in line
    assert digests.find_newest_step(run) == 4  # the owner is unknown, and readers reject the checkpoint


def test_process_0_broadcasts_run_id_to_other_processes(tmp_path):
    folders = [RunDir(tmp_path / 'run'), RunDir(tmp_path / 'elsewhere').as_non_primary()]
    folders[0].initialize(make_tiny_spec(), {})
    checkpointers = run_group(
        2, lambda group: Checkpointer(folders[group.process_index], CHECKPOINT_CONFIG, {}, group)
    )
    for each in checkpointers:
        each.close()
    assert checkpointers[0].run_id == checkpointers[1].run_id == folders[0].read_run_id()


@pytest.mark.slow
def test_resume_rejects_checkpoints_of_another_run_and_fork_gets_own_id(corpus, tmp_path):
    run, other_run = RunDir(tmp_path / 'ours'), RunDir(tmp_path / 'theirs')
    for folder in (run, other_run):
        train_run(make_spec(corpus), folder.path)
    for step in (4, 8):
        replace_checkpoint(other_run, run, step)
    with pytest.raises(UserError, match=f'{other_run.read_run_id()}.*{run.read_run_id()}'):
        train_run(make_spec(corpus), run.path)
    fork, origin = RunDir(tmp_path / 'fork'), warm_start.WarmStart(other_run, 4, make_spec(corpus))
    loop.train(make_spec(corpus), Hardware(), fork, dict(row='fork'), origin=origin)
    assert fork.read_run_id() not in (None, other_run.read_run_id())
    assert digests.find_corruption(fork, 4) is None
    with pytest.raises(UserError, match=run.read_run_id()):
        loop.train(
            make_spec(corpus),
            Hardware(),
            RunDir(tmp_path / 'x'),
            {},
            origin=warm_start.WarmStart(run, 4, make_spec(corpus)),
        )
    assert not RunDir(tmp_path / 'x').has_run()
