"""Digests of checkpoints: detection, report and rejection of corrupt files."""

import errno
import hashlib
import json
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs
from checkpoint_damages import (
    CHECKPOINT_DAMAGES,
    flip_bit,
    remove_digests,
    remove_file,
    replace_by_pickle,
    swap_files,
    truncate_file,
)
from conftest import make_tiny_spec
from thread_group import run_group

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint.checkpointer import Checkpointer, find_corruption_on_all
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import atomic_write as files
from sinklab.storage import directories

DATA = dict(store='0123', seed=0)
CHECKPOINT_CONFIG = make_tiny_spec().checkpoint
RNG = np.random.default_rng(0)
VALUES = {name: RNG.normal(size=(8, 16)).astype(np.float32) for name in 'abc'}


@pytest.fixture(autouse=True)
def disk_without_delay(monkeypatch):
    """Make written files visible without delay."""
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.0)


def make_state(step):
    return jax.tree.map(lambda x: jnp.asarray(x) + step, dict(step=jnp.int32(0), params=VALUES))


def make_abstract_state():
    device_sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device_sharding),
        jax.eval_shape(lambda: make_state(0)),
    )


@pytest.fixture(scope='module')
def saved_run(tmp_path_factory):
    """Return a run folder with checkpoints 2 and 4."""
    folder = RunDir(tmp_path_factory.mktemp('run'))
    checkpoints = Checkpointer(folder, CHECKPOINT_CONFIG, DATA)
    for step in (2, 4):
        checkpoints.save(step, make_state(step))
    checkpoints.close()
    return folder


def copy_run(saved_run, path):
    shutil.copytree(saved_run.path, path)
    return RunDir(path)


def open_checkpointer(folder, group=None):
    return Checkpointer(folder, CHECKPOINT_CONFIG, DATA, group)


DAMAGE_NUMBERS = [
    pytest.param(number, marks=pytest.mark.exhaustive if number >= 2 * len(CHECKPOINT_DAMAGES) else ())
    for number in range(200)
]


def is_named(names, reason):
    return any(name in reason for name in ([names] if isinstance(names, str) else names))


@pytest.mark.slow
@pytest.mark.parametrize('number', DAMAGE_NUMBERS)
def test_corrupt_checkpoint_is_named_and_previous_step_is_restored(saved_run, tmp_path, number):
    folder, rng = copy_run(saved_run, tmp_path / 'run'), np.random.default_rng(number)
    names = CHECKPOINT_DAMAGES[number % len(CHECKPOINT_DAMAGES)](folder, 4, rng)
    checkpoints = open_checkpointer(folder)
    newest_step, (line,) = checkpoints.find_latest_valid_step()
    assert newest_step == 2
    assert line.startswith(f'{folder.checkpoint_dir}/4 ')
    assert len(line.splitlines()) == 1
    assert is_named(names, line)
    restored = checkpoints.restore(newest_step, make_abstract_state())
    jax.tree.map(np.testing.assert_array_equal, restored, make_state(2))
    checkpoints.close()


@pytest.mark.parametrize(
    'damages',
    [
        (flip_bit, remove_file),
        (swap_files, truncate_file),
        (replace_by_pickle, replace_by_pickle),
        (remove_digests, remove_digests),
    ],
)
def test_all_corrupt_checkpoints_are_named_and_left_unchanged(saved_run, tmp_path, damages):
    folder, rng = copy_run(saved_run, tmp_path / 'run'), np.random.default_rng(0)
    names = {step: damage(folder, step, rng) for step, damage in zip((2, 4), damages, strict=True)}
    contents = {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()}
    with pytest.raises(UserError, match=r'/checkpoints\b(?!/)') as error:
        open_checkpointer(folder).find_latest_valid_step()
    line = str(error.value)
    assert len(line.splitlines()) == 1
    assert all(is_named(expected_names, line) for expected_names in names.values())
    assert {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()} == contents


def test_corrupt_checkpoint_is_quarantined_with_digests_and_saved_again(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    for name in ('4', '4.1'):
        flip_bit(folder, 4, np.random.default_rng(0))
        damaged_files = {
            path.name: path.read_bytes() for path in (folder.checkpoint_dir / '4').rglob('*') if path.is_file()
        }
        checkpoints = open_checkpointer(folder)
        assert checkpoints.find_latest_valid_step()[1][0].endswith(f'{folder.quarantine_dir}/{name}')
        quarantine_folder = folder.quarantine_dir / name
        assert {
            path.name: path.read_bytes() for path in (quarantine_folder / 'checkpoint').rglob('*') if path.is_file()
        } == damaged_files
        assert json.loads((quarantine_folder / 'digests' / '0.json').read_text())['step'] == 4
        checkpoints.save(4, make_state(4))
        checkpoints.close()
        assert open_checkpointer(folder).find_latest_valid_step() == (4, [])


def test_corrupt_older_checkpoint_is_ignored_when_newest_is_valid(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    flip_bit(folder, 2, np.random.default_rng(0))
    assert open_checkpointer(folder).find_latest_valid_step() == (4, [])


def delete_digests(folder, step):
    """Delete the digests of a step, as an interrupted save leaves it."""
    for file in (folder.digest_dir / str(step)).iterdir():
        file.unlink()


def test_incomplete_checkpoint_is_skipped_even_when_it_is_first(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    delete_digests(folder, 4)
    newest_step, (line,) = open_checkpointer(folder).find_latest_valid_step()
    assert newest_step == 2
    assert 'save' in line
    delete_digests(folder, 2)
    newest_step, (line,) = open_checkpointer(folder).find_latest_valid_step()
    assert newest_step is None
    assert line.startswith(f'{folder.checkpoint_dir}/2 ')
    assert open_checkpointer(folder).find_latest_valid_step() == (None, [])


@pytest.mark.parametrize('last_step', [2, 4])
def test_incomplete_checkpoint_is_deleted_after_repeated_interruptions(saved_run, tmp_path, last_step):
    folder = copy_run(saved_run, tmp_path / 'run')
    if last_step == 2:
        checkpointer.delete_step(folder, 4)
    for _ in range(3):
        delete_digests(folder, last_step)
        checkpoints = open_checkpointer(folder)
        newest_step, (line,) = checkpoints.find_latest_valid_step()
        assert (newest_step, 'deleted' in line) == (2 if last_step == 4 else None, True)
        checkpoints.save(last_step, make_state(last_step))
        checkpoints.close()
    assert not folder.quarantine_dir.exists()
    assert open_checkpointer(folder).find_latest_valid_step() == (last_step, [])


def test_digests_visible_late_do_not_make_checkpoint_incomplete(three_process_run, monkeypatch):
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 5.0)
    file = digests.get_digest_path(three_process_run, 4, 2)
    moved_file = file.rename(three_process_run.path / 'away')
    timer = threading.Timer(0.1, moved_file.rename, [file])
    timer.start()
    assert open_checkpointer(three_process_run).find_latest_valid_step() == (4, [])
    timer.join()


def test_moved_checkpoint_is_valid_after_it_is_moved_back(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    moved_folder = (folder.checkpoint_dir / '4').rename(tmp_path / 'away')
    assert open_checkpointer(folder).find_latest_valid_step() == (2, [])
    moved_folder.rename(folder.checkpoint_dir / '4')
    assert open_checkpointer(folder).find_latest_valid_step() == (4, [])


def test_stale_digests_do_not_validate_incomplete_checkpoint(saved_run, tmp_path, monkeypatch):
    folder = copy_run(saved_run, tmp_path / 'run')
    shutil.rmtree(folder.checkpoint_dir / '4')
    checkpoints = open_checkpointer(folder)
    monkeypatch.setattr(digests, 'write_digests', lambda *arguments: None)
    checkpoints.save(4, make_state(4))
    checkpoints.close()
    assert digests.find_corruption(folder, 4).is_incomplete


def test_digests_of_partly_deleted_checkpoint_are_deleted(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    (folder.checkpoint_dir / '2').rename(folder.checkpoint_dir / f'2{directories.DELETED_SUFFIX}')
    open_checkpointer(folder)
    assert [path.name for path in folder.digest_dir.iterdir()] == ['4']
    assert folder.list_checkpoint_steps() == [4]


def test_two_checkpoints_without_digests_are_rejected(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    for step in (2, 4):
        delete_digests(folder, step)
    with pytest.raises(UserError, match=r'/checkpoints\b(?!/)'):
        open_checkpointer(folder).find_latest_valid_step()


FILES = [
    '_METADATA',
    'state/manifest.ocdbt',
    *(f'state/ocdbt.process_{process}/d/{name}' for process in range(3) for name in 'ab'),
    'state/array_metadatas/process_1',
]


@pytest.fixture
def three_process_run(tmp_path):
    """Return a run folder with a checkpoint of three processes and the digests of each."""
    folder = RunDir(tmp_path / 'run')
    for name in FILES:
        file = folder.checkpoint_dir / '4' / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    (folder.digest_dir / '4').mkdir(parents=True)
    for process in range(3):
        digests.write_digests(folder, 4, process, 3, seconds=1.0)
    return folder


def test_digests_of_all_processes_cover_every_file(three_process_run):
    parts = [
        json.loads(digests.get_digest_path(three_process_run, 4, process).read_text())['files']
        for process in range(3)
    ]
    assert sorted(name for part in parts for name in part) == sorted(FILES)
    assert all(f'process_{process}' in name for process in (1, 2) for name in parts[process])


@pytest.mark.parametrize('count', [1, 2, 5])
@pytest.mark.parametrize('name', FILES)
def test_any_process_count_finds_each_corrupt_file(three_process_run, name, count):
    assert not any(digests.find_corruption(three_process_run, 4, process, count) for process in range(count))
    (three_process_run.checkpoint_dir / '4' / name).write_text(name[::-1])
    faults = [
        fault for process in range(count) if (fault := digests.find_corruption(three_process_run, 4, process, count))
    ]
    assert [(name in fault.reason, fault.is_incomplete) for fault in faults] == [(True, False)]


def test_all_processes_return_same_corruption(three_process_run):
    (three_process_run.checkpoint_dir / '4' / FILES[-1]).unlink()
    lines = run_group(2, lambda group: find_corruption_on_all(three_process_run, 4, group).reason)
    assert lines == [lines[0]] * 2
    assert FILES[-1] in lines[0]


def test_all_processes_skip_same_checkpoint_and_one_quarantines_it(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    flip_bit(folder, 4, np.random.default_rng(0))
    first_result, second_result = run_group(
        2, lambda group: open_checkpointer(folder, group).find_latest_valid_step()
    )
    assert first_result == second_result
    assert first_result[0] == 2
    assert [path.name for path in folder.quarantine_dir.iterdir()] == ['4']


@pytest.mark.slow
def test_write_digests_waits_for_late_files_and_rejects_missing_files(three_process_run, monkeypatch):
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.5)
    moved_folder = three_process_run.checkpoint_dir.rename(three_process_run.path / 'away')
    content = digests.get_digest_path(three_process_run, 4, 1).read_bytes()
    with pytest.raises(FileNotFoundError, match='process 1'):
        digests.write_digests(three_process_run, 4, 1, 3, seconds=1.0)
    assert digests.get_digest_path(three_process_run, 4, 1).read_bytes() == content
    timer = threading.Timer(0.1, moved_folder.rename, [three_process_run.checkpoint_dir])
    timer.start()
    digests.write_digests(three_process_run, 4, 1, 3, seconds=1.0)
    timer.join()
    assert digests.find_corruption(three_process_run, 4) is None


def test_find_corruption_raises_storage_error_for_unlistable_folder(three_process_run, monkeypatch):
    def scandir(path, scandir=os.scandir):
        if str(path).endswith('state'):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    with pytest.raises(OSError, match='Input/output error'):
        digests.find_corruption(three_process_run, 4)


@pytest.mark.parametrize('content', ['', '{}', '[]', 'null', '{"step": 4, "process": 0, "processes": "x"}'])
def test_malformed_digests_are_reported_as_corrupt(saved_run, tmp_path, content):
    folder = copy_run(saved_run, tmp_path / 'run')
    digests.get_digest_path(folder, 4, 0).write_text(content)
    assert f'{folder.digest_dir}/4/0.json' in digests.read_digests(folder, 4).reason
    assert not digests.read_digests(folder, 4).is_incomplete


def make_damage(**values):
    return lambda part: json.dumps(part | values)


WRONG_TYPES = {
    '100,000 nested brackets': lambda part: '[' * 100_000 + ']' * 100_000,
    'a number': lambda part: '5',
    'size a text': make_damage(files={'a': ['x', '00']}),
    'size negative': make_damage(files={'a': [-1, '00']}),
    'size 10^30': make_damage(files={'a': [10**30, '00']}),
    'size true': make_damage(files={'a': [True, '00']}),
    'digest a number': make_damage(files={'a': [1, 5]}),
    'digest null': make_damage(files={'a': [1, None]}),
    'a file a text': make_damage(files={'a': 'xy'}),
    'a file an object': make_damage(files={'a': {'b': 1, 'c': 2}}),
    'a file null': make_damage(files={'a': None}),
    'files a list': make_damage(files=[['a', 1, '00']]),
    'a name of 100,000 folders': make_damage(files={'a/' * 100_000: [1, '00']}),
    'written a number': make_damage(written=5),
    'seconds a text': make_damage(seconds='1'),
    'seconds NaN': make_damage(seconds=float('nan')),
    'seconds -1': make_damage(seconds=-1),
    'processes 10^30': make_damage(processes=10**30),
    'processes 0': make_damage(processes=0),
    'processes 1.5': make_damage(processes=1.5),
    'step true': make_damage(step=True),
    'id a list': make_damage(run_id=['a']),
}


@pytest.mark.parametrize('damage', WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_digests_with_wrong_types_are_reported_as_corrupt(saved_run, tmp_path, damage):
    folder = copy_run(saved_run, tmp_path / 'run')
    file = digests.get_digest_path(folder, 4, 0)
    file.write_text(damage(json.loads(file.read_text())))
    assert digests.find_newest_step(folder) == 2
    assert str(file) in digests.find_corruption(folder, 4).reason
    assert not digests.find_corruption(folder, 4).is_incomplete


def test_digests_accept_file_size_above_4_gib(saved_run, tmp_path):
    folder = copy_run(saved_run, tmp_path / 'run')
    file = digests.get_digest_path(folder, 4, 0)
    file.write_text(make_damage(files={'a': [5 << 30, '00']})(json.loads(file.read_text())))
    assert digests.read_digests(folder, 4).files == {'a': (5 << 30, '00')}


@pytest.mark.parametrize('name', ['../../secret', '/etc/passwd', 'a\\b'])
def test_digests_reject_file_name_outside_checkpoint(tmp_path, name):
    folder = RunDir(tmp_path)
    runs.write_checkpoints(folder, 4)
    (tmp_path / 'secret').write_bytes(b'of a run')
    file = digests.get_digest_path(folder, 4, 0)
    part = json.loads(file.read_text())
    part['files'][name] = [8, hashlib.sha256(b'of a run').hexdigest()]
    file.write_text(json.dumps(part))
    assert repr(name) in digests.find_corruption(folder, 4).reason
