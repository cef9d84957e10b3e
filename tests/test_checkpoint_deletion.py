"""Tests of checkpoints that cannot be deleted and of the cleanup after interrupted deletions."""

import os
import re

import jax.numpy as jnp
import pytest
from conftest import make_tiny_spec

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.checkpoint.orbax_compat import TEMPORARY_SUFFIX
from sinklab.run_dir import RunDir

STATE = dict(step=jnp.int32(0), params=dict(w=jnp.zeros(3)))


@pytest.fixture
def undeletable_metadata(monkeypatch):
    """Make the deletion of the checkpoint metadata of Orbax fail."""
    original_unlink = os.unlink

    def unlink_unless_metadata(path, *arguments, **options):
        if os.path.basename(path) == '_CHECKPOINT_METADATA':
            raise PermissionError(1, 'Operation not permitted', path)
        original_unlink(path, *arguments, **options)

    monkeypatch.setattr(os, 'unlink', unlink_unless_metadata)


def save_checkpoints(path, *steps, **changes):
    checkpoints = Checkpointer(RunDir(path), make_tiny_spec(**changes).checkpoint, {})
    for step in steps:
        checkpoints.save(step, STATE)
    checkpoints.close()
    return checkpoints


@pytest.mark.slow
def test_undeletable_incomplete_checkpoint_is_reported(tmp_path, undeletable_metadata):
    save_checkpoints(tmp_path, 2, 4)
    digests.get_digest_path(RunDir(tmp_path), 4, 0).unlink()
    checkpoints = Checkpointer(RunDir(tmp_path), make_tiny_spec().checkpoint, {})
    newest_step, (line,) = checkpoints.find_latest_valid_step()
    checkpoints.close()
    assert newest_step == 2
    assert 'it is deleted' not in line
    assert re.search(rf'{tmp_path}/checkpoints/4\.\w+\.deleted .*Operation not permitted', line)
    assert RunDir(tmp_path).list_checkpoint_steps() == [2]


def test_undeletable_checkpoint_is_reported_by_retention_in_one_line(tmp_path, undeletable_metadata, capsys):
    save_checkpoints(tmp_path, 2, 4, 6, checkpoint__keep=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf'{tmp_path}/checkpoints/2\.\w+\.deleted .*Operation not permitted', line)
    assert RunDir(tmp_path).list_checkpoint_steps() == [4, 6]


def test_undeletable_checkpoint_is_retried_by_next_attempt(tmp_path, undeletable_metadata, monkeypatch, capsys):
    save_checkpoints(tmp_path, 2, 4)
    assert len(checkpointer.delete_step(RunDir(tmp_path), 4)) == 1
    save_checkpoints(tmp_path)
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.undo()
    save_checkpoints(tmp_path)
    assert [path.name for path in RunDir(tmp_path).checkpoint_dir.iterdir()] == ['2']
    assert capsys.readouterr().err == ''


def test_undeletable_step_can_be_saved_again_and_removed_by_retention(tmp_path, undeletable_metadata, capsys):
    save_checkpoints(tmp_path, 2)
    checkpointer.delete_step(RunDir(tmp_path), 2)
    save_checkpoints(tmp_path, 2, 4, 6, checkpoint__keep=2)
    assert RunDir(tmp_path).list_checkpoint_steps() == [4, 6]
    assert 'Traceback' not in capsys.readouterr().err


@pytest.mark.parametrize('name', ['2.deleted', '2.0a1b2c3d.deleted'])
def test_cleanup_removes_digests_of_checkpoint_with_interrupted_deletion(tmp_path, name):
    save_checkpoints(tmp_path, 2, 4)
    (tmp_path / 'checkpoints' / '2').rename(tmp_path / 'checkpoints' / name)
    checkpointer.clean_up_run_dir(RunDir(tmp_path))
    assert [path.name for path in RunDir(tmp_path).digest_dir.iterdir()] == ['4']
    assert [path.name for path in RunDir(tmp_path).checkpoint_dir.iterdir()] == ['4']


def test_cleanup_keeps_digests_of_moved_checkpoint_with_temporary_folder(tmp_path):
    save_checkpoints(tmp_path, 2, 4)
    (tmp_path / 'checkpoints' / '2').rename(tmp_path / 'away')
    (tmp_path / 'checkpoints' / f'2{TEMPORARY_SUFFIX}-1').mkdir()
    checkpointer.clean_up_run_dir(RunDir(tmp_path))
    assert sorted(path.name for path in RunDir(tmp_path).digest_dir.iterdir()) == ['2', '4']
