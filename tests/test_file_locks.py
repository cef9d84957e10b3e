"""Lock files on a disk: mutual exclusion, locks of dead and suspended processes, and irregular files."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import warnings

import pytest
from conftest import make_tiny_spec
from sinklab.storage.compare_and_swap import hold_lock
from sinklab.storage.untrusted_files import DamagedFileError
from thread_group import run_in_threads

from sinklab.errors import UserError
from sinklab.resume_checks import check_run_dir
from sinklab.run_dir import RunDir

pytestmark = pytest.mark.slow

HOLDER_SCRIPT = """
import pathlib, sys, time
from sinklab.storage.compare_and_swap import hold_lock
with hold_lock(pathlib.Path(sys.argv[1])):
    print('here', flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'lease.lock'


@pytest.fixture
def holder(path):
    """Start a process that holds the lock."""
    process = subprocess.Popen([sys.executable, '-c', HOLDER_SCRIPT, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'here\n'
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize('content', [None, b'', b'left by an earlier version'])
def test_threads_enter_sequentially(path, content):
    """Also use a lock file that an earlier version left: such versions created and deleted the file."""
    if content is not None:
        path.write_bytes(content)
    inside, counts = [], []

    def enter_lock():
        with hold_lock(path):
            inside.append(1)
            time.sleep(0.02)
            counts.append(len(inside))
            inside.pop()

    run_in_threads(8, enter_lock)
    assert counts == [1] * 8


def test_deleted_lock_file_does_not_admit_two_threads(path):
    """Delete the file while the lock is held, as a user may do after an error message."""
    inside, counts = [], []

    def enter_lock():
        with hold_lock(path):
            inside.append(1)
            time.sleep(0.02)
            counts.append(len(inside))
            inside.pop()
            path.unlink()

    run_in_threads(8, enter_lock)
    assert counts == [1] * 8


def test_lock_of_killed_process_is_released(path, holder):
    holder.kill()
    start_time = time.monotonic()
    with hold_lock(path):
        assert time.monotonic() - start_time < 10


def test_lock_of_suspended_process_is_refused_after_timeout(path, holder):
    holder.send_signal(signal.SIGSTOP)
    wait_calls = []
    with (
        pytest.raises(UserError) as error,
        hold_lock(path, timeout_seconds=0.3, on_wait=lambda: wait_calls.append('waits')),
    ):
        pass
    assert wait_calls == ['waits']
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def make_flock_fail(monkeypatch, error_number):
    """Let `flock` fail with an errno."""

    def fail(file, operation):
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(fcntl, 'flock', fail)


def test_disk_without_locks_is_refused_in_one_line(path, monkeypatch):
    make_flock_fail(monkeypatch, errno.ENOLCK)
    with pytest.raises(UserError, match='No locks available') as error, hold_lock(path):
        pass
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_disk_without_flock_call_uses_existence_of_file(path, monkeypatch):
    make_flock_fail(monkeypatch, errno.ENOSYS)
    monkeypatch.setattr(warnings, 'warn', lambda *arguments, **options: None)
    with hold_lock(path):
        assert path.exists()
        with pytest.raises(UserError), hold_lock(path, timeout_seconds=0.1):
            pass
    assert not path.exists()


def test_hold_lock_does_not_create_missing_folder(path):
    with pytest.raises(FileNotFoundError), hold_lock(path.parent / 'missing' / 'lease.lock'):
        pass
    assert list(path.parent.iterdir()) == []


def test_hold_lock_leaves_no_open_descriptor(path):
    num_descriptors = len(os.listdir('/proc/self/fd'))
    for _ in range(3):
        with hold_lock(path):
            pass
    assert len(os.listdir('/proc/self/fd')) == num_descriptors


def make_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as local_socket:
        local_socket.bind(path.name)


IRREGULAR_FILE_MAKERS = {
    'a folder': os.mkdir,
    'a FIFO': os.mkfifo,
    'a socket': make_socket,
    'a link to a device': lambda path: path.symlink_to('/dev/zero'),
    'a link to itself': lambda path: path.symlink_to(path.name),
    'a link to nothing': lambda path: path.symlink_to('nothing'),
}


@pytest.mark.parametrize('make_file', IRREGULAR_FILE_MAKERS.values(), ids=IRREGULAR_FILE_MAKERS)
def test_hold_lock_rejects_irregular_file(path, make_file):
    make_file(path)
    with pytest.raises(DamagedFileError) as error, hold_lock(path):
        pass
    line = str(error.value)
    assert str(path) in line
    assert len(line.splitlines()) == 1
    assert os.path.lexists(path)


@pytest.mark.parametrize('name', ['a folder', 'a FIFO', 'a socket', 'a link to a device', 'a link to itself'])
def test_check_run_dir_rejects_irregular_lock_file(path, name):
    folder = RunDir(path.parent)
    folder.initialize(make_tiny_spec(), {})
    IRREGULAR_FILE_MAKERS[name](path)
    with pytest.raises(DamagedFileError, match=r'lease\.lock'):
        check_run_dir(folder, make_tiny_spec())
