"""Digests of checkpoints: damaged files are found, named and passed over."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_damages import CHECKPOINT_DAMAGES, flip_bit, remove_digests, remove_file, swap_files, truncate_file
from thread_group import run_group
from tiny_specs import make_tiny_spec

from sinklab.checkpoint import digests
from sinklab.checkpoint.checkpointer import Checkpointer, find_damage_on_all
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import files

pytestmark = pytest.mark.usefixtures('no_disk_delay')
DATA = dict(store='0123', seed=0)
CHECKPOINT_CONFIG = make_tiny_spec().checkpoint
RNG = np.random.default_rng(0)
VALUES = {name: RNG.normal(size=(8, 16)).astype(np.float32) for name in 'abc'}


def make_state(step):
    return jax.tree.map(lambda x: jnp.asarray(x) + step, dict(step=jnp.int32(0), params=VALUES))


def make_abstract_state():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: make_state(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


@pytest.fixture
def folder(tmp_path):
    """Return a run folder with checkpoints 2 and 4."""
    folder = RunDir(tmp_path / 'run')
    checkpoints = open_checkpointer(folder)
    for step in (2, 4):
        checkpoints.save(step, make_state(step))
    checkpoints.close()
    return folder


def open_checkpointer(folder, group=None):
    return Checkpointer(folder, CHECKPOINT_CONFIG, DATA, group)


def is_named(names, text):
    return any(name in text for name in ([names] if isinstance(names, str) else names))


DAMAGES = [
    pytest.param(damage, number, marks=pytest.mark.exhaustive if number else (), id=f'{damage.__name__}-{number}')
    for damage in CHECKPOINT_DAMAGES
    for number in range(2)
]


@pytest.mark.parametrize(('damage', 'number'), DAMAGES)
def test_damaged_checkpoint_is_moved_and_previous_step_is_restored(folder, damage, number):
    names = damage(folder, 4, np.random.default_rng(number))
    checkpoints = open_checkpointer(folder)
    step, (line,) = checkpoints.choose_sound_step()
    assert step == 2
    assert line.startswith(f'{folder.checkpoint_dir}/4 ')
    assert line.endswith(f'{folder}/damaged/4')
    assert is_named(names, line)
    assert len(line.splitlines()) == 1
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(step, make_abstract_state()), make_state(2))
    checkpoints.save(4, make_state(4))
    checkpoints.close()
    assert open_checkpointer(folder).choose_sound_step() == (4, [])


@pytest.mark.parametrize('damages', [(flip_bit, remove_file), (swap_files, truncate_file), (remove_digests,) * 2])
def test_run_without_sound_checkpoint_is_refused_and_left_unchanged(folder, damages):
    rng = np.random.default_rng(0)
    names = {step: damage(folder, step, rng) for step, damage in zip((2, 4), damages, strict=True)}
    contents = {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()}
    with pytest.raises(UserError) as error:
        open_checkpointer(folder).choose_sound_step()
    assert all(is_named(expected, str(error.value)) for expected in names.values())
    assert len(str(error.value).splitlines()) == 1
    assert {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()} == contents


def test_first_save_without_digests_counts_as_none(folder):
    files.remove_folder(folder.checkpoint_dir / '4')
    remove_digests(folder, 2, None)
    assert digests.find_newest_step(folder) is None
    step, (line,) = open_checkpointer(folder).choose_sound_step()
    assert step is None
    assert line.startswith(f'{folder.checkpoint_dir}/2 ')
    assert open_checkpointer(folder).choose_sound_step() == (None, [])


SAVED_FILES = [
    '_METADATA',
    'state/manifest.ocdbt',
    *(f'state/ocdbt.process_{process}/d/{name}' for process in range(3) for name in 'ab'),
    'state/array_metadatas/process_1',
]


@pytest.fixture
def shared_checkpoint(tmp_path):
    """Return a checkpoint of three processes with the digests of each."""
    checkpoint = tmp_path / '4'
    for name in SAVED_FILES:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(name)
    for process in range(3):
        digests.write_digests(checkpoint, process, 3)
    return checkpoint


def test_each_process_digests_its_own_files(shared_checkpoint):
    parts = [json.loads((shared_checkpoint / f'digests_{process}.json').read_text())['files'] for process in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(SAVED_FILES)
    assert all(f'process_{process}' in name for process in (1, 2) for name in parts[process])


@pytest.mark.parametrize('count', [1, 2, 5])
@pytest.mark.parametrize('name', SAVED_FILES)
def test_any_number_of_processes_finds_each_damaged_file(shared_checkpoint, name, count):
    assert not any(digests.find_damage(shared_checkpoint, process, count) for process in range(count))
    (shared_checkpoint / name).write_text(name[::-1])
    damages = [digests.find_damage(shared_checkpoint, process, count) for process in range(count)]
    assert [name in damage for damage in damages if damage] == [True]


def test_all_processes_return_same_damage_and_one_moves_the_checkpoint(folder, shared_checkpoint):
    (shared_checkpoint / SAVED_FILES[-1]).unlink()
    lines = run_group(2, lambda group: find_damage_on_all(shared_checkpoint, group))
    assert lines == [lines[0]] * 2
    assert SAVED_FILES[-1] in lines[0]
    flip_bit(folder, 4, np.random.default_rng(0))
    first, second = run_group(2, lambda group: open_checkpointer(folder, group).choose_sound_step())
    assert first == second
    assert first[0] == 2
    assert [path.name for path in (folder.path / 'damaged').iterdir()] == ['4']


def test_checkpoint_without_merged_manifest_is_refused(shared_checkpoint):
    (shared_checkpoint / 'state' / 'manifest.ocdbt').unlink()
    with pytest.raises(FileNotFoundError):
        digests.write_digests(shared_checkpoint, 0, 3)


def test_error_of_disk_is_no_damage(shared_checkpoint, monkeypatch):
    def scandir(path, scandir=os.scandir):
        if str(path).endswith('state'):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    with pytest.raises(OSError, match='Input/output error'):
        digests.find_damage(shared_checkpoint)


@pytest.mark.parametrize('content', ['', '[]', '{"processes": 0, "files": {}}', '{"processes": 1}'])
def test_damaged_digests_are_named(folder, content):
    path = digests.get_digest_path(folder.checkpoint_dir / '4', 0)
    path.write_text(content)
    assert str(path) in digests.find_damage(folder.checkpoint_dir / '4')
    assert digests.find_newest_step(folder) == 2
