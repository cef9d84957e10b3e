"""Tests of checkpoints: background saves, retention, restores and errors of storage."""

import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_specs import make_tiny_config, make_tiny_spec

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.validate import parse_config
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train.run_outcome import classify_error

DATA = dict(store='0123', seed=0)
CHECKPOINT_CONFIG = make_tiny_spec().checkpoint
VALUES = {name: np.arange(6, dtype=np.float32).reshape(2, 3) + 1 / 3 for name in 'abc'}
STATE = jax.tree.map(jnp.asarray, dict(step=4, params=VALUES))


def open_checkpointer(folder, config=CHECKPOINT_CONFIG, data=DATA):
    return Checkpointer(folder, config, data)


def save_checkpoints(folder, *steps, config=CHECKPOINT_CONFIG):
    checkpoints = open_checkpointer(folder, config)
    for step in steps:
        checkpoints.save(step, STATE)
    checkpoints.close()
    return checkpoints


@pytest.fixture(scope='module')
def saved_run(tmp_path_factory):
    """Make a run folder with the checkpoints 2 and 4."""
    folder = RunDir(tmp_path_factory.mktemp('run'))
    save_checkpoints(folder, 2, 4)
    return folder


def make_abstract_state(state=STATE, sharding=None):
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def test_restore_on_another_mesh_is_bit_identical(saved_run):
    mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    expected = make_abstract_state(sharding=sharding) | dict(
        params=make_abstract_state(STATE['params'], split_sharding)
    )
    restored = open_checkpointer(saved_run).restore(4, expected)
    jax.tree.map(np.testing.assert_array_equal, restored, STATE)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored['params'])} == {split_sharding}


def test_restore_of_checkpoint_of_other_data_is_rejected(saved_run):
    with pytest.raises(UserError, match='store 0123 -> 4567'):
        open_checkpointer(saved_run, data=DATA | dict(store='4567')).restore(4, make_abstract_state())


def test_restore_compares_order_of_data(tmp_path):
    folder, data = RunDir(tmp_path), DATA | dict(order='89ab')
    checkpoints = open_checkpointer(folder, data=data)
    checkpoints.save(4, STATE)
    checkpoints.close()
    open_checkpointer(folder, data=data).restore(4, make_abstract_state())
    with pytest.raises(UserError, match='grain') as error:
        open_checkpointer(folder, data=data | dict(order='cdef')).restore(4, make_abstract_state())
    assert '\n' not in str(error.value)
    assert f'{folder}/environment.json' in str(error.value)
    with pytest.raises(UserError, match='seed 0 -> 1'):
        open_checkpointer(folder, data=data | dict(seed=1, order='cdef')).restore(4, make_abstract_state())


@pytest.mark.parametrize(
    'params',
    [dict(STATE['params'], a=jnp.zeros((2, 4))), dict(STATE['params'], d=jnp.zeros(1)), dict(a=STATE['params']['a'])],
)
def test_restore_of_checkpoint_of_another_model_is_rejected(saved_run, params):
    with pytest.raises(UserError, match='checkpoints/4'):
        open_checkpointer(saved_run).restore(4, make_abstract_state(STATE | dict(params=params)))


@pytest.mark.parametrize('partial_load', [True, False])
def test_load_refuses_checkpoint_that_lacks_a_leaf(saved_run, partial_load):
    params = make_abstract_state(dict(STATE['params'], d=jnp.zeros(1)))
    with pytest.raises(UserError, match=r'checkpoints/4.*\bd\b'):
        checkpointer.load_state(saved_run.checkpoint_dir / '4', dict(params=params), partial_load)


def test_load_takes_part_of_a_checkpoint_only_on_request(saved_run):
    abstract_parts = dict(params=make_abstract_state(dict(a=STATE['params']['a'])))
    loaded = checkpointer.load_state(saved_run.checkpoint_dir / '4', abstract_parts, partial_load=True)
    np.testing.assert_array_equal(loaded['params'].pop('a'), VALUES['a'])
    assert loaded == dict(params={})
    with pytest.raises(UserError, match='checkpoints/4'):
        checkpointer.load_state(saved_run.checkpoint_dir / '4', abstract_parts)


def test_digests_are_written_in_background(tmp_path, monkeypatch):
    release_event, original_write = threading.Event(), digests.write_digests
    monkeypatch.setattr(digests, 'write_digests', lambda *args: (release_event.wait(60), original_write(*args)))
    checkpoints = open_checkpointer(RunDir(tmp_path))
    checkpoints.save(1, STATE)
    checkpoints.raise_save_error()
    assert not (tmp_path / 'checkpoints' / '1' / 'digests_0.json').exists()
    release_event.set()
    checkpoints.wait_until_finished()
    assert (tmp_path / 'checkpoints' / '1' / 'digests_0.json').exists()


class WriteError(Exception):
    pass


@pytest.mark.parametrize(
    'call_method',
    [Checkpointer.raise_save_error, Checkpointer.wait_until_finished, lambda saver: saver.save(2, STATE)],
)
def test_background_save_error_is_raised_once_by_next_call(tmp_path, monkeypatch, call_method):
    def raise_write_error(*_):
        raise WriteError

    monkeypatch.setattr(digests, 'write_digests', raise_write_error)
    checkpoints = open_checkpointer(RunDir(tmp_path))
    checkpoints.save(1, STATE)
    checkpoints.pending_save.exception()
    with pytest.raises(WriteError):
        call_method(checkpoints)
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize(('keep', 'keep_every_steps', 'expected_steps'), [(3, 0, [4, 5, 6]), (2, 3, [3, 5, 6])])
def test_retention_keeps_last_and_periodic_checkpoints(tmp_path, keep, keep_every_steps, expected_steps):
    config = parse_config(
        make_tiny_config(
            checkpoint__keep=keep,
            checkpoint__keep_every_steps=keep_every_steps,
            checkpoint__every_steps=keep_every_steps or 1,
        ).to_dict()
    ).checkpoint
    save_checkpoints(RunDir(tmp_path), *range(1, 7), config=config)
    assert RunDir(tmp_path).list_checkpoint_steps() == expected_steps
    assert not any(digests.find_damage(tmp_path / 'checkpoints' / str(step)) for step in expected_steps)


def test_leftovers_of_interrupted_process_are_removed_and_nothing_else(saved_run, tmp_path):
    folder = RunDir(shutil.copytree(saved_run.path, tmp_path / 'run'))
    expected_files = {path for path in folder.path.rglob('*') if path.is_file()}
    leftover = folder.checkpoint_dir / '6.orbax-checkpoint-tmp' / 'state'
    leftover.mkdir(parents=True)
    (leftover / 'half').write_text('of it')
    open_checkpointer(folder)
    assert {path for path in folder.path.rglob('*') if path.is_file()} == expected_files
    save_checkpoints(folder, 6)
    assert open_checkpointer(folder).choose_sound_step() == (6, [])


def fill_disk(path):
    with path.open('wb', buffering=0) as file:
        while file.write(b'x' * 4096) == 4096:
            pass


def test_full_disk_raises_user_error_and_keeps_previous_checkpoint(small_disk):
    folder, checkpoints = RunDir(small_disk / 'run'), open_checkpointer(RunDir(small_disk / 'run'))
    checkpoints.save(1, STATE)
    checkpoints.wait_until_finished()
    with pytest.raises(OSError, match='No space'):
        fill_disk(small_disk / 'ballast')
    with pytest.raises(OSError, match='No space') as error:
        save_and_wait(checkpoints)
    assert classify_error(error.value).exit_code == 1
    assert str(small_disk) in classify_error(error.value).message
    checkpoints.close()
    (small_disk / 'ballast').unlink()
    checkpoints = save_checkpoints(folder, 2)
    assert checkpoints.choose_sound_step() == (2, [])
    assert digests.find_damage(folder.checkpoint_dir / '1') is None


def save_and_wait(checkpoints):
    checkpoints.save(2, STATE)
    checkpoints.wait_until_finished()


def test_restore_parameters_returns_host_arrays(saved_run):
    parameters = checkpointer.restore_parameters(saved_run.path, 4)
    assert parameters.keys() == VALUES.keys()
    for name, leaf in parameters.items():
        assert type(leaf) is np.ndarray
        np.testing.assert_array_equal(leaf, VALUES[name])


def test_restore_parameters_rejects_damaged_checkpoint(saved_run, tmp_path):
    folder = RunDir(shutil.copytree(saved_run.path, tmp_path / 'run'))
    (folder.checkpoint_dir / '4' / 'state' / '_sharding').write_text('{}')
    with pytest.raises(UserError, match=r'checkpoints/4.*state/_sharding'):
        checkpointer.restore_parameters(folder.path, 4)


@pytest.mark.parametrize(
    'file_pattern', ['state/_METADATA', '_CHECKPOINT_METADATA', 'state/manifest.ocdbt', 'state/d/*']
)
@pytest.mark.slow
def test_restore_of_checkpoint_changed_after_verification_raises_error_of_one_line(saved_run, tmp_path, file_pattern):
    folder = RunDir(shutil.copytree(saved_run.path, tmp_path / 'run'))
    checkpoints = open_checkpointer(folder)
    assert checkpoints.choose_sound_step() == (4, [])
    (path,) = (folder.checkpoint_dir / '4').glob(file_pattern)
    path.write_text('')
    with pytest.raises(UserError, match='checkpoints/4') as error:
        checkpoints.restore(4, make_abstract_state())
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 300 + len(str(folder))
