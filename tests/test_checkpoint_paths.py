"""Tests of paths that Orbax cannot restore."""

import os

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from tiny_runs import make_spec, train_run

from sinklab.checkpoint import digests
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.paths import check_checkpoint_path

UNREADABLE_NAMES = ['a[x]', 'a\\b', 'a*', 'a?', os.fsdecode(b'\xff')]
READABLE_NAME = ' ]{}%20#~|:;&\'"$!@=+,()ü日'


@pytest.mark.parametrize('name', UNREADABLE_NAMES, ids=ascii)
def test_path_unreadable_by_orbax_is_rejected(tmp_path, monkeypatch, name):
    with pytest.raises(UserError):
        check_checkpoint_path(tmp_path / name / 'run')
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError):
        check_checkpoint_path(RunDir('run').path)


def test_train_with_unreadable_path_writes_nothing(tmp_path, corpus):
    with pytest.raises(UserError):
        train_run(make_spec(corpus), tmp_path / 'a[x]')
    assert list(tmp_path.iterdir()) == []


def test_path_with_other_special_characters_is_restored(tmp_path):
    folder = tmp_path / READABLE_NAME
    check_checkpoint_path(folder)
    ocp.save(folder / '5', {'a': np.arange(4)})
    np.testing.assert_array_equal(ocp.load(folder / '5')['a'], np.arange(4))
    assert digests.has_manifest(str(path.relative_to(folder)) for path in folder.rglob('*'))
