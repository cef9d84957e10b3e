"""Paths that checkpoints cannot be saved under are refused first, and one that cannot be restored is not sound."""

import os

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from runs import spec, train

from sinklab.checkpoint import checkpointer, digests
from sinklab.cli import main
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.paths import check_path_readable_by_orbax

UNREADABLE = ['a[x]', 'a\\b', 'a*', 'a?', os.fsdecode(b'\xff')]
READABLE = ' ]{}%20#~|:;&\'"$!@=+,()ü日'


@pytest.mark.parametrize('name', UNREADABLE, ids=ascii)
def test_a_path_is_refused_below_which_orbax_loses_files(tmp_path, monkeypatch, name):
    with pytest.raises(UserError):
        check_path_readable_by_orbax(tmp_path / name / 'run')
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError):
        check_path_readable_by_orbax(RunDir('run').path)


def test_nothing_is_written_where_training_is_refused_for_its_path(tmp_path, corpus):
    with pytest.raises(UserError):
        train(spec(corpus), tmp_path / 'a[x]')
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_not_written_to_such_a_path(tmp_path):
    assert main.main(['checkpoint', 'restore-params', f'{tmp_path}/run', f'--out={tmp_path}/a[x]/out']) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_other_character_of_a_path_is_restored(tmp_path):
    folder = tmp_path / READABLE
    check_path_readable_by_orbax(folder)
    ocp.save(folder / '5', {'a': np.arange(4)})
    np.testing.assert_array_equal(ocp.load(folder / '5')['a'], np.arange(4))
    assert digests.find_missing_manifest(str(path.relative_to(folder)) for path in folder.rglob('*')) is None


@pytest.mark.slow
def test_a_checkpoint_without_its_merged_manifest_is_faulty_and_refused(tmp_path, corpus):
    """As code before this check has saved them: with digests of all files that there were."""
    train(spec(corpus, optimizer__steps=4), tmp_path)
    folder, step = RunDir(tmp_path), RunDir(tmp_path).list_checkpoint_steps()[-1]
    assert digests.find_corruption(folder, step) is None
    manifest = folder.checkpoint_dir / str(step) / 'state' / 'manifest.ocdbt'
    manifest.unlink()
    with pytest.raises(FileNotFoundError):
        digests.write_digests(folder, step, 0, 1, seconds=1.0)
    digest = folder.digest_dir / str(step) / '0.json'
    lines = digest.read_text().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if '"state/manifest.ocdbt"' in line)
    digest.write_text(''.join(lines[:at] + lines[at + 4 :]))
    assert 'state/manifest.ocdbt' in digests.find_corruption(folder, step).reason
    with pytest.raises(UserError):
        checkpointer.restore_parameters(tmp_path, step)
    assert main.main(['checkpoint', 'verify', str(tmp_path)]) == 1
