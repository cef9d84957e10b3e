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
import runs
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
RULES = make_tiny_spec().checkpoint
RNG = np.random.default_rng(0)
VALUES = {name: RNG.normal(size=(8, 16)).astype(np.float32) for name in 'abc'}


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    """Make written files visible without delay."""
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.0)


def state(step):
    return jax.tree.map(lambda x: jnp.asarray(x) + step, dict(step=jnp.int32(0), params=VALUES))


def abstract():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), jax.eval_shape(lambda: state(0))
    )


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Return a run folder with checkpoints 2 and 4."""
    folder = RunDir(tmp_path_factory.mktemp('run'))
    checkpoints = Checkpointer(folder, RULES, DATA)
    for step in (2, 4):
        checkpoints.save(step, state(step))
    checkpoints.close()
    return folder


def copied(saved, path):
    shutil.copytree(saved.path, path)
    return RunDir(path)


def opened(folder, group=None):
    return Checkpointer(folder, RULES, DATA, group)


DAMAGES = [
    pytest.param(number, marks=pytest.mark.exhaustive if number >= 2 * len(CHECKPOINT_DAMAGES) else ())
    for number in range(200)
]


def is_named(names, why):
    return any(name in why for name in ([names] if isinstance(names, str) else names))


@pytest.mark.slow
@pytest.mark.parametrize('number', DAMAGES)
def test_corrupt_checkpoint_is_named_and_previous_step_is_restored(saved, tmp_path, number):
    folder, rng = copied(saved, tmp_path / 'run'), np.random.default_rng(number)
    names = CHECKPOINT_DAMAGES[number % len(CHECKPOINT_DAMAGES)](folder, 4, rng)
    checkpoints = opened(folder)
    newest, (line,) = checkpoints.find_latest_valid_step()
    assert newest == 2
    assert line.startswith(f'{folder.checkpoint_dir}/4 ')
    assert len(line.splitlines()) == 1
    assert is_named(names, line)
    restored = checkpoints.restore(newest, abstract())
    jax.tree.map(np.testing.assert_array_equal, restored, state(2))
    checkpoints.close()


@pytest.mark.parametrize(
    'ways',
    [
        (flip_bit, remove_file),
        (swap_files, truncate_file),
        (replace_by_pickle, replace_by_pickle),
        (remove_digests, remove_digests),
    ],
)
def test_all_corrupt_checkpoints_are_named_and_left_unchanged(saved, tmp_path, ways):
    folder, rng = copied(saved, tmp_path / 'run'), np.random.default_rng(0)
    names = {step: way(folder, step, rng) for step, way in zip((2, 4), ways, strict=True)}
    before = {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()}
    with pytest.raises(UserError, match=r'/checkpoints\b(?!/)') as refusal:
        opened(folder).find_latest_valid_step()
    line = str(refusal.value)
    assert len(line.splitlines()) == 1
    assert all(is_named(of, line) for of in names.values())
    assert {path: path.read_bytes() for path in folder.path.rglob('*') if path.is_file()} == before


def test_corrupt_checkpoint_is_quarantined_with_digests_and_saved_again(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    for name in ('4', '4.1'):
        flip_bit(folder, 4, np.random.default_rng(0))
        damaged = {
            path.name: path.read_bytes() for path in (folder.checkpoint_dir / '4').rglob('*') if path.is_file()
        }
        checkpoints = opened(folder)
        assert checkpoints.find_latest_valid_step()[1][0].endswith(f'{folder.quarantine_dir}/{name}')
        aside = folder.quarantine_dir / name
        assert {
            path.name: path.read_bytes() for path in (aside / 'checkpoint').rglob('*') if path.is_file()
        } == damaged
        assert json.loads((aside / 'digests' / '0.json').read_text())['step'] == 4
        checkpoints.save(4, state(4))
        checkpoints.close()
        assert opened(folder).find_latest_valid_step() == (4, [])


def test_corrupt_older_checkpoint_is_ignored_when_newest_is_valid(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    flip_bit(folder, 2, np.random.default_rng(0))
    assert opened(folder).find_latest_valid_step() == (4, [])


def cut_short(folder, step):
    """Delete the digests of a step, as an interrupted save leaves it."""
    for file in (folder.digest_dir / str(step)).iterdir():
        file.unlink()


def test_incomplete_checkpoint_is_skipped_even_when_it_is_first(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    cut_short(folder, 4)
    newest, (line,) = opened(folder).find_latest_valid_step()
    assert newest == 2
    assert 'save' in line
    cut_short(folder, 2)
    newest, (line,) = opened(folder).find_latest_valid_step()
    assert newest is None
    assert line.startswith(f'{folder.checkpoint_dir}/2 ')
    assert opened(folder).find_latest_valid_step() == (None, [])


@pytest.mark.parametrize('last', [2, 4])
def test_incomplete_checkpoint_is_deleted_after_repeated_interruptions(saved, tmp_path, last):
    folder = copied(saved, tmp_path / 'run')
    if last == 2:
        checkpointer.delete_step(folder, 4)
    for _ in range(3):
        cut_short(folder, last)
        checkpoints = opened(folder)
        newest, (line,) = checkpoints.find_latest_valid_step()
        assert (newest, 'deleted' in line) == (2 if last == 4 else None, True)
        checkpoints.save(last, state(last))
        checkpoints.close()
    assert not folder.quarantine_dir.exists()
    assert opened(folder).find_latest_valid_step() == (last, [])


def test_digests_visible_late_do_not_make_checkpoint_incomplete(of_three, monkeypatch):
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 5.0)
    file = digests.get_digest_path(of_three, 4, 2)
    away = file.rename(of_three.path / 'away')
    later = threading.Timer(0.1, away.rename, [file])
    later.start()
    assert opened(of_three).find_latest_valid_step() == (4, [])
    later.join()


def test_moved_checkpoint_is_valid_after_it_is_moved_back(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    away = (folder.checkpoint_dir / '4').rename(tmp_path / 'away')
    assert opened(folder).find_latest_valid_step() == (2, [])
    away.rename(folder.checkpoint_dir / '4')
    assert opened(folder).find_latest_valid_step() == (4, [])


def test_stale_digests_do_not_validate_incomplete_checkpoint(saved, tmp_path, monkeypatch):
    folder = copied(saved, tmp_path / 'run')
    shutil.rmtree(folder.checkpoint_dir / '4')
    checkpoints = opened(folder)
    monkeypatch.setattr(digests, 'write_digests', lambda *given: None)
    checkpoints.save(4, state(4))
    checkpoints.close()
    assert digests.find_corruption(folder, 4).is_incomplete


def test_digests_of_partly_deleted_checkpoint_are_deleted(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    (folder.checkpoint_dir / '2').rename(folder.checkpoint_dir / f'2{directories.DELETED_SUFFIX}')
    opened(folder)
    assert [path.name for path in folder.digest_dir.iterdir()] == ['4']
    assert folder.list_checkpoint_steps() == [4]


def test_two_checkpoints_without_digests_are_rejected(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    for step in (2, 4):
        cut_short(folder, step)
    with pytest.raises(UserError, match=r'/checkpoints\b(?!/)'):
        opened(folder).find_latest_valid_step()


FILES = [
    '_METADATA',
    'state/manifest.ocdbt',
    *(f'state/ocdbt.process_{process}/d/{name}' for process in range(3) for name in 'ab'),
    'state/array_metadatas/process_1',
]


@pytest.fixture
def of_three(tmp_path):
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


def test_digests_of_all_processes_cover_every_file(of_three):
    parts = [json.loads(digests.get_digest_path(of_three, 4, process).read_text())['files'] for process in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(FILES)
    assert all(f'process_{process}' in name for process in (1, 2) for name in parts[process])


@pytest.mark.parametrize('count', [1, 2, 5])
@pytest.mark.parametrize('name', FILES)
def test_any_process_count_finds_each_corrupt_file(of_three, name, count):
    assert not any(digests.find_corruption(of_three, 4, process, count) for process in range(count))
    (of_three.checkpoint_dir / '4' / name).write_text(name[::-1])
    faults = [fault for process in range(count) if (fault := digests.find_corruption(of_three, 4, process, count))]
    assert [(name in fault.reason, fault.is_incomplete) for fault in faults] == [(True, False)]


def test_all_processes_return_same_corruption(of_three):
    (of_three.checkpoint_dir / '4' / FILES[-1]).unlink()
    lines = run_group(2, lambda group: find_corruption_on_all(of_three, 4, group).reason)
    assert lines == [lines[0]] * 2
    assert FILES[-1] in lines[0]


def test_all_processes_skip_same_checkpoint_and_one_quarantines_it(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    flip_bit(folder, 4, np.random.default_rng(0))
    one, other = run_group(2, lambda group: opened(folder, group).find_latest_valid_step())
    assert one == other
    assert one[0] == 2
    assert [path.name for path in folder.quarantine_dir.iterdir()] == ['4']


@pytest.mark.slow
def test_write_digests_waits_for_late_files_and_rejects_missing_files(of_three, monkeypatch):
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.5)
    away = of_three.checkpoint_dir.rename(of_three.path / 'away')
    written = digests.get_digest_path(of_three, 4, 1).read_bytes()
    with pytest.raises(FileNotFoundError, match='process 1'):
        digests.write_digests(of_three, 4, 1, 3, seconds=1.0)
    assert digests.get_digest_path(of_three, 4, 1).read_bytes() == written
    later = threading.Timer(0.1, away.rename, [of_three.checkpoint_dir])
    later.start()
    digests.write_digests(of_three, 4, 1, 3, seconds=1.0)
    later.join()
    assert digests.find_corruption(of_three, 4) is None


def test_find_corruption_raises_storage_error_for_unlistable_folder(of_three, monkeypatch):
    def scandir(path, scandir=os.scandir):
        if str(path).endswith('state'):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    with pytest.raises(OSError, match='Input/output error'):
        digests.find_corruption(of_three, 4)


@pytest.mark.parametrize('content', ['', '{}', '[]', 'null', '{"step": 4, "process": 0, "processes": "x"}'])
def test_malformed_digests_are_reported_as_corrupt(saved, tmp_path, content):
    folder = copied(saved, tmp_path / 'run')
    digests.get_digest_path(folder, 4, 0).write_text(content)
    assert f'{folder.digest_dir}/4/0.json' in digests.read_digests(folder, 4).reason
    assert not digests.read_digests(folder, 4).is_incomplete


def change(**values):
    return lambda part: json.dumps(part | values)


TYPES = {
    '100,000 nested brackets': lambda part: '[' * 100_000 + ']' * 100_000,
    'a number': lambda part: '5',
    'size a text': change(files={'a': ['x', '00']}),
    'size negative': change(files={'a': [-1, '00']}),
    'size 10^30': change(files={'a': [10**30, '00']}),
    'size true': change(files={'a': [True, '00']}),
    'digest a number': change(files={'a': [1, 5]}),
    'digest null': change(files={'a': [1, None]}),
    'a file a text': change(files={'a': 'xy'}),
    'a file an object': change(files={'a': {'b': 1, 'c': 2}}),
    'a file null': change(files={'a': None}),
    'files a list': change(files=[['a', 1, '00']]),
    'a name of 100,000 folders': change(files={'a/' * 100_000: [1, '00']}),
    'written a number': change(written=5),
    'seconds a text': change(seconds='1'),
    'seconds NaN': change(seconds=float('nan')),
    'seconds -1': change(seconds=-1),
    'processes 10^30': change(processes=10**30),
    'processes 0': change(processes=0),
    'processes 1.5': change(processes=1.5),
    'step true': change(step=True),
    'id a list': change(run_id=['a']),
}


@pytest.mark.parametrize('damage', TYPES.values(), ids=TYPES)
def test_digests_with_wrong_types_are_reported_as_corrupt(saved, tmp_path, damage):
    folder = copied(saved, tmp_path / 'run')
    file = digests.get_digest_path(folder, 4, 0)
    file.write_text(damage(json.loads(file.read_text())))
    assert digests.find_newest_step(folder) == 2
    assert str(file) in digests.find_corruption(folder, 4).reason
    assert not digests.find_corruption(folder, 4).is_incomplete


def test_digests_accept_file_size_above_4_gib(saved, tmp_path):
    folder = copied(saved, tmp_path / 'run')
    file = digests.get_digest_path(folder, 4, 0)
    file.write_text(change(files={'a': [5 << 30, '00']})(json.loads(file.read_text())))
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
