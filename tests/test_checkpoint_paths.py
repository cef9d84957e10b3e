"""Tests of paths that Orbax cannot restore, and of checkpoints without a manifest."""

import os

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from tiny_runs import make_spec, train_run

from sinklab.checkpoint import checkpointer, digests
from sinklab.cli import main
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.paths import check_path_readable_by_orbax

UNREADABLE_NAMES = ['a[x]', 'a\\b', 'a*', 'a?', os.fsdecode(b'\xff')]
READABLE_NAME = ' ]{}%20#~|:;&\'"$!@=+,()ü日'


@pytest.mark.parametrize('name', UNREADABLE_NAMES, ids=ascii)
def test_path_unreadable_by_orbax_is_rejected(tmp_path, monkeypatch, name):
    with pytest.raises(UserError):
        check_path_readable_by_orbax(tmp_path / name / 'run')
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError):
        check_path_readable_by_orbax(RunDir('run').path)


def test_train_with_unreadable_path_writes_nothing(tmp_path, corpus):
    with pytest.raises(UserError):
        train_run(make_spec(corpus), tmp_path / 'a[x]')
    assert list(tmp_path.iterdir()) == []


def test_restore_params_to_unreadable_path_writes_nothing(tmp_path):
    assert main.main(['checkpoint', 'restore-params', f'{tmp_path}/run', f'--out={tmp_path}/a[x]/out']) == 1
    assert list(tmp_path.iterdir()) == []


def test_path_with_other_special_characters_is_restored(tmp_path):
    folder = tmp_path / READABLE_NAME
    check_path_readable_by_orbax(folder)
    ocp.save(folder / '5', {'a': np.arange(4)})
    np.testing.assert_array_equal(ocp.load(folder / '5')['a'], np.arange(4))
    assert digests.find_missing_manifest(str(path.relative_to(folder)) for path in folder.rglob('*')) is None


@pytest.mark.slow
def test_checkpoint_without_merged_manifest_is_rejected(tmp_path, corpus):
    """Older code saved such checkpoints with digests of all existing files."""
    train_run(make_spec(corpus, optimizer__steps=4), tmp_path)
    folder, step = RunDir(tmp_path), RunDir(tmp_path).list_checkpoint_steps()[-1]
    assert digests.find_corruption(folder, step) is None
    manifest_path = folder.checkpoint_dir / str(step) / 'state' / 'manifest.ocdbt'
    manifest_path.unlink()
    with pytest.raises(FileNotFoundError):
        digests.write_digests(folder, step, 0, 1, seconds=1.0)
    digest_path = folder.digest_dir / str(step) / '0.json'
    lines = digest_path.read_text().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if '"state/manifest.ocdbt"' in line)
    digest_path.write_text(''.join(lines[:index] + lines[index + 4 :]))
    assert 'state/manifest.ocdbt' in digests.find_corruption(folder, step).reason
    with pytest.raises(UserError):
        checkpointer.restore_parameters(tmp_path, step)
    assert main.main(['checkpoint', 'verify', str(tmp_path)]) == 1
