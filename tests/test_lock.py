"""A lock on a shared disk: two processes that interleave as badly as they can are never inside together."""

import contextlib
import errno
import os
import pathlib
import socket
import stat
import threading
import time

import pytest
from conftest import tiny

from sinklab.run_dir import RunDir
from sinklab.storage import compare_and_swap
from sinklab.storage.untrusted_files import DamagedFileError

pytestmark = pytest.mark.slow

DEAD = 0.6


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A lock whose owner is taken for dead soon."""
    monkeypatch.setattr(compare_and_swap, 'STALE_LOCK_SECONDS', DEAD)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'lease.lock'


class Section:
    """What a lock protects: who is inside, and how many were at most."""

    def __init__(self, path):
        self.path, self.inside, self.most = path, [], 0
        self.entered = {name: threading.Event() for name in ('first', 'second', 'third')}

    def enter(self, name, seconds):
        """Starts a thread of this name that goes in and stays so long."""

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
    """Stops a thread once, for at most a second, as it calls a method of Path for the lock; returns when it does."""
    called, come = getattr(pathlib.Path, method), threading.Event()

    def stopped(self, *given, **more):
        if threading.current_thread().name == name and 'lease.lock' in self.name and not come.is_set():
            come.set()
            until.wait(1.0)
        return called(self, *given, **more)

    monkeypatch.setattr(pathlib.Path, method, stopped)
    return come


def test_of_two_that_see_a_dead_lock_the_slower_does_not_replace_the_lock_of_the_faster(path, monkeypatch):
    """The first stops between its look at the dead lock and its replacing it, until the second is inside."""
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


def test_whoever_was_taken_for_dead_does_not_delete_the_lock_of_its_successor(path, monkeypatch):
    """The first stops between its look at its own lock and its deleting it, until the second is inside."""
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


def test_on_a_disk_without_locks_of_the_kernel_a_dead_lock_is_taken_over_as_well(path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(compare_and_swap.fcntl, 'flock', refuse)
    path.touch()
    with compare_and_swap.acquire_lock(path):
        assert path.exists()
    assert list(path.parent.iterdir()) == []


def test_a_process_that_was_stopped_while_it_took_over_is_not_waited_for_for_ever(path, monkeypatch):
    monkeypatch.setattr(compare_and_swap, 'FLOCK_WAIT_FACTOR', 2)
    path.touch()
    with path.open('rb+') as file:
        compare_and_swap.fcntl.flock(file, compare_and_swap.fcntl.LOCK_EX)
        with compare_and_swap.acquire_lock(path):
            pass
    assert list(path.parent.iterdir()) == []


def test_no_descriptor_is_left_open(path):
    before = len(os.listdir('/proc/self/fd'))
    path.touch()
    for _ in range(3):
        with compare_and_swap.acquire_lock(path):
            pass
    assert len(os.listdir('/proc/self/fd')) == before


def make_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


IRREGULAR = {
    'a folder': os.mkdir,
    'a FIFO': os.mkfifo,
    'a socket': make_socket,
    'a link to a device': lambda path: path.symlink_to('/dev/zero'),
    'a link to itself': lambda path: path.symlink_to(path.name),
    'a link to nothing': lambda path: path.symlink_to('nothing'),
}


@pytest.mark.parametrize('make', IRREGULAR.values(), ids=IRREGULAR)
def test_what_is_no_file_in_the_place_of_a_lock_is_refused_at_once(path, make, monkeypatch):
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
def test_a_run_whose_lock_is_no_file_is_refused_before_it_starts(path, name):
    folder = RunDir(path.parent)
    folder.initialize(tiny(), {})
    IRREGULAR[name](path)
    with pytest.raises(DamagedFileError, match=r'lease\.lock'):
        folder.check_spec(tiny())


@pytest.mark.parametrize('taken_over', [False, True])
def test_only_its_owner_may_write_a_lock(path, taken_over):
    if taken_over:
        path.touch()
    mask = os.umask(0)
    try:
        with compare_and_swap.acquire_lock(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(mask)
