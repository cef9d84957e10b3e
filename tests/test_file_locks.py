"""Lock files on a shared disk: mutual exclusion under adverse interleaving."""

import contextlib
import errno
import os
import pathlib
import socket
import stat
import threading
import time

import pytest
from conftest import make_tiny_spec

from sinklab.run_dir import RunDir
from sinklab.storage import compare_and_swap
from sinklab.storage.untrusted_files import DamagedFileError

pytestmark = pytest.mark.slow

DEAD = 0.6


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the time after which a lock is stale."""
    monkeypatch.setattr(compare_and_swap, 'STALE_LOCK_SECONDS', DEAD)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'lease.lock'


class Section:
    """Critical section of a lock, with its current threads and their largest number."""

    def __init__(self, path):
        self.path, self.inside, self.most = path, [], 0
        self.entered = {name: threading.Event() for name in ('first', 'second', 'third')}

    def enter(self, name, seconds):
        """Start a named thread that holds the lock for some seconds."""

        def come():
            with compare_and_swap.acquire_lock(self.path):
                self.inside.append(name)
                self.most = max(self.most, len(self.inside))
                self.entered[name].set()
                time.sleep(seconds)
                self.inside.remove(name)

        thread = threading.Thread(target=come, name=name)
        thread.start()
        return thread


def stop_at(monkeypatch, method, name, until):
    """Block a thread once, for at most one second, in a Path method on the lock; return an event set at that time."""
    called, come = getattr(pathlib.Path, method), threading.Event()

    def stopped(self, *arguments, **more):
        if threading.current_thread().name == name and 'lease.lock' in self.name and not come.is_set():
            come.set()
            until.wait(1.0)
        return called(self, *arguments, **more)

    monkeypatch.setattr(pathlib.Path, method, stopped)
    return come


def test_slower_process_does_not_replace_lock_after_stale_takeover(path, monkeypatch):
    """Block the first thread between reading and replacing the stale lock, until the second holds the lock."""
    path.touch()
    section = Section(path)
    come = stop_at(monkeypatch, 'replace', 'first', section.entered['second'])
    first = section.enter('first', DEAD / 3)
    assert come.wait(10)
    second = section.enter('second', 2 * DEAD)
    for thread in (first, second):
        thread.join(30)
    assert section.most == 1
    assert section.entered['first'].is_set()
    assert section.entered['second'].is_set()
    assert list(path.parent.iterdir()) == []


def test_stale_owner_does_not_delete_lock_of_successor(path, monkeypatch):
    """Block the first thread between reading and deleting its own lock, until the second holds the lock."""
    section = Section(path)
    come = stop_at(monkeypatch, 'unlink', 'first', section.entered['second'])
    first = section.enter('first', DEAD / 3)
    assert section.entered['first'].wait(10)
    second = section.enter('second', DEAD / 3)
    assert come.wait(10)
    assert section.entered['second'].wait(10)
    first.join(30)
    third = section.enter('third', 0.0)
    for thread in (second, third):
        thread.join(30)
    assert section.most == 1
    assert list(path.parent.iterdir()) == []


def test_stale_lock_is_taken_over_without_flock_support(path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(compare_and_swap.fcntl, 'flock', refuse)
    path.touch()
    with compare_and_swap.acquire_lock(path):
        assert path.exists()
    assert list(path.parent.iterdir()) == []


def test_takeover_does_not_wait_forever_for_stopped_process(path, monkeypatch):
    monkeypatch.setattr(compare_and_swap, 'FLOCK_WAIT_FACTOR', 2)
    path.touch()
    with path.open('rb+') as file:
        compare_and_swap.fcntl.flock(file, compare_and_swap.fcntl.LOCK_EX)
        with compare_and_swap.acquire_lock(path):
            pass
    assert list(path.parent.iterdir()) == []


def test_acquire_lock_leaves_no_open_descriptor(path):
    before = len(os.listdir('/proc/self/fd'))
    path.touch()
    for _ in range(3):
        with compare_and_swap.acquire_lock(path):
            pass
    assert len(os.listdir('/proc/self/fd')) == before


def make_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as local_socket:
        local_socket.bind(path.name)


IRREGULAR = {
    'a folder': os.mkdir,
    'a FIFO': os.mkfifo,
    'a socket': make_socket,
    'a link to a device': lambda path: path.symlink_to('/dev/zero'),
    'a link to itself': lambda path: path.symlink_to(path.name),
    'a link to nothing': lambda path: path.symlink_to('nothing'),
}


@pytest.mark.parametrize('make', IRREGULAR.values(), ids=IRREGULAR)
def test_acquire_lock_rejects_irregular_file_immediately(path, make, monkeypatch):
    monkeypatch.setattr(compare_and_swap, 'STALE_LOCK_SECONDS', 60.0)
    make(path)
    refused = []

    def come():
        with pytest.raises(DamagedFileError) as raised, compare_and_swap.acquire_lock(path):
            pass
        refused.append(str(raised.value))

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    thread.join(10)
    (line,) = refused
    assert str(path) in line
    assert len(line.splitlines()) == 1
    assert os.path.lexists(path)


@pytest.mark.parametrize('name', ['a folder', 'a FIFO', 'a socket', 'a link to a device', 'a link to itself'])
def test_check_spec_rejects_irregular_lock_file(path, name):
    folder = RunDir(path.parent)
    folder.initialize(make_tiny_spec(), {})
    IRREGULAR[name](path)
    with pytest.raises(DamagedFileError, match=r'lease\.lock'):
        folder.check_spec(make_tiny_spec())


@pytest.mark.parametrize('taken_over', [False, True])
def test_lock_file_is_writable_only_by_owner(path, taken_over):
    if taken_over:
        path.touch()
    mask = os.umask(0)
    try:
        with compare_and_swap.acquire_lock(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(mask)
