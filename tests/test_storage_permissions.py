"""Read-only or full storage: one-line error, exit code 1 and no remaining Orbax thread."""

import contextlib
import errno
import os
import subprocess
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_spec

from sinklab.checkpoint import checkpointer
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.checkpoint.orbax_compat import translate_storage_errors
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.hf import files
from sinklab.run_dir import RunDir
from sinklab.storage.atomic_write import open_writable_folder
from sinklab.storage.paths import describe_permission, is_permanent_error
from sinklab.train.run_outcome import classify_error

STATE = dict(step=jnp.int32(4), params=dict(w=jnp.arange(4000.0)))
PERMANENT_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


@pytest.fixture
def run_dir(tmp_path):
    """Return a run folder with checkpoint 4."""
    checkpoints = Checkpointer(RunDir(tmp_path / 'run'), make_tiny_spec().checkpoint, {})
    checkpoints.save(4, STATE)
    checkpoints.close()
    return checkpoints.run_dir


@pytest.fixture
def mount_tmpfs(tmp_path):
    """Yield a function that mounts a small file system with options of `mount`."""
    folders = []

    def mount(*options):
        folder = tmp_path / f'disk{len(folders)}'
        folder.mkdir()
        command = ['mount', '-t', 'tmpfs', '-o', ','.join(options), 'tmpfs', folder]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip('only root may mount the file systems of this test')
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(['umount', '-l', folder], check=True)


@pytest.fixture
def read_only_folder(tmp_path, request):
    """Return a folder that this user cannot write, even as root."""
    if os.geteuid() == 0:
        return request.getfixturevalue('mount_tmpfs')('ro')
    folder = tmp_path / 'closed'
    folder.mkdir(mode=0o555)
    return folder


def save_and_close(checkpoints):
    with contextlib.closing(checkpoints):
        checkpoints.save(1, STATE)


def make_folder_and_fail(folder):
    folder.mkdir()
    raise KeyError


def find_waiting_threads(earlier_threads, seconds=3.0):
    """Return names of threads that still keep this process alive some seconds after a failure."""
    deadline = time.monotonic() + seconds
    while names := [thread.name for thread in set(threading.enumerate()) - earlier_threads if not thread.daemon]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return names


@pytest.mark.slow
def test_save_to_unwritable_checkpoint_folder_leaves_no_thread(tmp_path):
    checkpoints, earlier_threads = (
        Checkpointer(RunDir(tmp_path), make_tiny_spec().checkpoint, {}),
        set(threading.enumerate()),
    )
    (tmp_path / 'checkpoints').rmdir()
    (tmp_path / 'checkpoints').write_text('a file in the place of the folder')
    with pytest.raises(UserError) as exc_info:
        save_and_close(checkpoints)
    assert f'{tmp_path}/checkpoints' in str(exc_info.value)
    assert ' -rw' in str(exc_info.value)
    assert find_waiting_threads(earlier_threads) == []


@pytest.mark.slow
def test_restore_params_to_read_only_folder_leaves_no_thread(run_dir, read_only_folder, capsys):
    earlier_threads = set(threading.enumerate())
    assert main(['checkpoint', 'restore-params', str(run_dir), f'--out={read_only_folder / "out"}']) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(read_only_folder) in line
    assert ' dr' in line
    assert find_waiting_threads(earlier_threads) == []


@pytest.mark.slow
def test_restore_params_to_full_disk_is_rejected_and_removes_files(run_dir, mount_tmpfs, capsys):
    disk = mount_tmpfs('size=16k')
    assert main(['checkpoint', 'restore-params', str(run_dir), f'--out={disk / "out"}']) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert 'left' in line
    assert str(disk) in line
    assert list(disk.iterdir()) == []


def test_write_arrays_raises_os_error_on_full_disk(mount_tmpfs):
    disk = mount_tmpfs('size=16k')
    array = np.zeros(1 << 16, np.float32)
    with pytest.raises(OSError, match='No space left') as error:
        files.write_arrays(disk, [('w', array.shape, lambda: array)], np.dtype(np.float32))
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(disk / files.MODEL_FILE)


@pytest.mark.parametrize('error_number', PERMANENT_ERRNOS, ids=errno.errorcode.get)
def test_classify_error_is_final_for_permanent_errors_and_names_path_and_mode(tmp_path, error_number):
    file = tmp_path / 'file'
    file.write_text('x')
    file.chmod(0o640)
    outcome = classify_error(OSError(error_number, os.strerror(error_number), str(file)))
    assert (outcome.kind, outcome.exit_code, outcome.trace) == ('refused', 1, '')
    assert str(file) in outcome.message
    assert '-rw-r-----' in outcome.message
    assert os.strerror(error_number) in outcome.message
    with pytest.raises(UserError, match=f'{file}.*-rw-r-----'), open_writable_folder(tmp_path):
        raise OSError(error_number, os.strerror(error_number), str(file))
    with pytest.raises(UserError, match=f'{file}.*-rw-r-----'), translate_storage_errors(RunDir(tmp_path)):
        raise OSError(error_number, os.strerror(error_number), str(file))


@pytest.mark.parametrize(
    'error',
    [
        OSError(errno.EIO, 'Input/output error', '/file'),
        OSError(errno.ESTALE, 'Stale file handle', '/file'),
        PermissionError(errno.EACCES, 'of a socket'),
    ],
    ids=str,
)
def test_classify_error_allows_restart_for_transient_errors(error):
    assert not is_permanent_error(error)
    assert classify_error(error).exit_code == 75


def test_describe_permission_names_nearest_accessible_parent(tmp_path):
    file = tmp_path / 'file'
    file.write_text('x')
    assert describe_permission(str(file / 'below' / 'it')).startswith(f'{file} ')
    assert ' -rw' in describe_permission(str(file / 'below' / 'it'))


def test_classify_error_names_target_of_failed_rename(tmp_path):
    (tmp_path / 'new').mkdir()
    (tmp_path / 'old').write_text('x')
    with pytest.raises(IsADirectoryError) as error:
        (tmp_path / 'old').replace(tmp_path / 'new')
    assert classify_error(error.value).message.startswith(f'{tmp_path / "new"} ')


def test_list_checkpoint_steps_raises_for_unreadable_folder(run_dir, monkeypatch):
    def deny(path):
        raise PermissionError(errno.EACCES, 'Permission denied', path)

    monkeypatch.setattr(os, 'listdir', deny)
    monkeypatch.setattr(os, 'scandir', deny)
    with pytest.raises(PermissionError):
        run_dir.list_checkpoint_steps()


def test_failed_save_of_parameters_removes_only_own_files(run_dir, tmp_path, monkeypatch):
    other_folder = tmp_path / 'out.orbax-checkpoint-tmp-of-another'
    other_folder.mkdir()
    monkeypatch.setattr(
        checkpointer.ocp, 'save', lambda path, params: make_folder_and_fail(path.with_name(f'{path.name}.tmp'))
    )
    with pytest.raises(KeyError):
        checkpointer.save_parameters(run_dir, run_dir.list_checkpoint_steps()[-1], tmp_path / 'out')
    assert sorted(tmp_path.iterdir()) == [other_folder, run_dir.path]
