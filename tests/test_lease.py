"""One job at a time in a folder, whoever comes, dies, sleeps or is started twice."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from threads import crowd

from sinklab.schema import UserError
from sinklab.storage import compare_and_swap as files
from sinklab.storage import lease
from sinklab.supervisor.messages import Timeouts

OTHER = dict(host='elsewhere', machine='another boot', pid=17, born='5', job='', attempt=0, token='theirs')
AS_IT_IS = lease.OWNER_TIMEOUT_SECONDS
LIVING = 'import sys, time; print("here", flush=True); time.sleep(600)'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Seconds become hundredths."""
    for name, seconds in dict(
        HEARTBEAT_SECONDS=0.05, OWNER_TIMEOUT_SECONDS=0.5, GRACE_MARGIN_SECONDS=0.1, POLL_SECONDS=0.01
    ).items():
        monkeypatch.setattr(lease, name, seconds)
    monkeypatch.setattr(files, 'STALE_LOCK_SECONDS', 1.0)
    for names, count in lease.CLUSTER_JOB_VARIABLES:
        for name in (*names, count):
            monkeypatch.delenv(name, raising=False)


def written(folder, beat=0.0, state='running', **changes):
    """A lease of another job."""
    folder.mkdir(exist_ok=True)
    (folder / lease.LEASE_NAME).write_text(json.dumps(OTHER | dict(beat=beat, state=state) | changes))


class Owner:
    """A job on another host, which beats as long as it is told to."""

    def __init__(self, folder, state='running', seconds=60.0, **changes):
        self.folder, self.state, self.changes, self.ended = folder, state, changes, threading.Event()
        self.end = time.monotonic() + seconds
        self.thread = threading.Thread(target=self.live)

    def __enter__(self):
        written(self.folder, state=self.state, **self.changes)
        self.thread.start()

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def live(self):
        beat = 0.0
        while time.monotonic() < self.end and not self.ended.wait(0.05):
            beat += 0.05
            if lease.read_owner_token(self.folder) != 'theirs':
                return
            written(self.folder, beat, self.state, **self.changes)


@pytest.mark.slow
def test_a_lease_is_there_while_it_is_held_and_gone_after(tmp_path):
    folder = tmp_path / 'some' / 'run'
    with lease.hold_lease(folder) as held:
        assert lease.read_owner_token(folder) == held.token
        first = lease.read_owner(folder / lease.LEASE_NAME)
        time.sleep(0.3)
        assert lease.read_owner(folder / lease.LEASE_NAME)['beat'] > first['beat']
        held.check()
    assert list(tmp_path.iterdir()) == [], 'a folder that was made for nothing is taken away'
    with lease.hold_lease(folder):
        (folder / 'config.json').write_text('{}')
    assert [path.name for path in folder.iterdir()] == ['config.json']


def test_a_second_job_is_refused_with_host_process_and_age_and_changes_nothing(tmp_path):
    words = rf'in use: another job \(process {os.getpid()} on .*\) has held its lease for \d+ s'
    with lease.hold_lease(tmp_path) as held:
        with pytest.raises(UserError, match=words), lease.hold_lease(tmp_path):
            pass
        held.check()
        assert lease.read_owner_token(tmp_path) == held.token


def test_a_job_of_another_host_is_alive_while_it_beats_whatever_its_clock_says(tmp_path):
    with Owner(tmp_path), pytest.raises(UserError, match='process 17 on elsewhere'), lease.hold_lease(tmp_path):
        pass


def test_a_job_whose_beat_may_be_kept_by_what_it_computes_is_given_the_time_that_its_supervisor_gives_it():
    assert Timeouts().busy_silence == AS_IT_IS


@pytest.mark.slow
def test_a_job_of_another_host_that_beats_no_more_is_dead(tmp_path, capsys):
    written(tmp_path, beat=1e9)
    start = time.monotonic()
    with lease.hold_lease(tmp_path) as held:
        assert 0.4 < time.monotonic() - start < 5
        assert lease.read_owner_token(tmp_path) == held.token
    words = 'for a heartbeat of another job (process 17 on elsewhere)\n'
    assert capsys.readouterr().err.endswith(words)


@pytest.mark.slow
def test_a_job_that_was_killed_while_it_stopped_is_waited_for_and_not_taken_for_one_that_works(tmp_path):
    """It has given signs of life before."""
    with Owner(tmp_path, 'stopping', seconds=0.15), lease.hold_lease(tmp_path, grace_seconds=0.3) as held:
        assert lease.read_owner_token(tmp_path) == held.token


@pytest.mark.parametrize('recycled', [False, True])
def test_a_dead_job_of_this_host_is_free_at_once_even_if_its_number_is_given_again(tmp_path, monkeypatch, recycled):
    monkeypatch.setattr(lease, 'OWNER_TIMEOUT_SECONDS', 60.0)
    with subprocess.Popen([sys.executable, '-c', LIVING], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        born = lease.get_process_start_time(process.pid)
        written(tmp_path, machine=lease.get_machine_id(), pid=process.pid, born='1' if recycled else born)
        if not recycled:
            with pytest.raises(UserError, match=f'process {process.pid}'), lease.hold_lease(tmp_path):
                pass
            process.kill()
            process.wait()
        with lease.hold_lease(tmp_path):
            pass
        process.kill()


@pytest.mark.slow
def test_a_job_that_is_stopping_is_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT_SECONDS', 5.0)  # on a loaded machine the other job may be late for 0.1 s
    monkeypatch.setattr(lease, 'OWNER_TIMEOUT_SECONDS', 2.0)
    start = time.monotonic()
    with Owner(tmp_path, 'stopping', seconds=0.8), lease.hold_lease(tmp_path, grace_seconds=5.0):
        assert time.monotonic() - start > 0.7
    assert capsys.readouterr().err == 'waiting until another job (process 17 on elsewhere) has stopped\n'


def test_a_job_that_is_stopping_for_too_long_is_a_job_that_works(tmp_path):
    with (
        Owner(tmp_path, 'stopping'),
        pytest.raises(UserError, match='in use'),
        lease.hold_lease(tmp_path, grace_seconds=0.1),
    ):
        pass


@pytest.mark.parametrize(
    ('variables', 'job', 'mine'),
    [
        (dict(SLURM_JOB_ID='7', SLURM_RESTART_COUNT='1'), '/7', True),
        (dict(SLURM_JOB_ID='7', SLURM_CLUSTER_NAME='big', SLURM_RESTART_COUNT='1'), 'big/7', True),
        (dict(JOBSET_NAME='a', JOBSET_NAMESPACE='n', JOBSET_RESTART_ATTEMPT='2'), 'n/a', True),
        (dict(SLURM_JOB_ID='7'), '/7', False),  # two steps of one job
        (dict(SLURM_JOB_ID='8', SLURM_RESTART_COUNT='1'), '/7', False),
    ],
)
def test_the_later_start_of_a_job_takes_over_from_the_earlier_at_once(tmp_path, monkeypatch, variables, job, mine):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Owner(tmp_path, job=job, attempt=0):
        if mine:
            with lease.hold_lease(tmp_path) as held:
                assert lease.read_owner_token(tmp_path) == held.token
        else:
            with pytest.raises(UserError, match='in use'), lease.hold_lease(tmp_path):
                pass


def test_a_job_whose_folder_was_taken_over_stops_and_touches_nothing(tmp_path):
    with lease.hold_lease(tmp_path) as held:
        (tmp_path / 'theirs').write_text(json.dumps(OTHER))
        (tmp_path / 'theirs').replace(tmp_path / lease.LEASE_NAME)
        time.sleep(0.2)
        with pytest.raises(
            lease.LeaseLostError, match=r'17 on elsewhere\) has taken over .*without another change to the folder'
        ):
            held.check()
    assert (tmp_path / lease.LEASE_NAME).read_text() == json.dumps(OTHER)


def test_a_job_that_has_slept_looks_before_it_goes_on(tmp_path):
    """Its thread has slept, too, and has not yet seen anything."""
    with lease.hold_lease(tmp_path) as held:
        held.stop_event.set()
        held.thread.join()
        (tmp_path / lease.LEASE_NAME).unlink()
        held.last_read_time -= 60
        with pytest.raises(lease.LeaseLostError, match='is gone'):
            held.check()


@pytest.fixture
def refuse_reads(monkeypatch):
    """A function that has the system refuse to open leases with an error number from then on; 0: no longer."""
    refused, usual = [0], os.open

    def refuse(path, flags, *rest, **options):
        if refused[0] and os.fspath(path).endswith(lease.LEASE_NAME):
            raise OSError(refused[0], os.strerror(refused[0]), path)
        return usual(path, flags, *rest, **options)

    monkeypatch.setattr(os, 'open', refuse)
    yield lambda number: refused.__setitem__(0, number)
    refused[0] = 0


@pytest.mark.slow
@pytest.mark.parametrize('number', [errno.EACCES, errno.EPERM, errno.ENXIO, errno.EIO, errno.ESTALE])
def test_a_lease_that_cannot_be_read_for_a_while_is_not_lost(tmp_path, refuse_reads, number):
    """As with Kerberos or NFS, whose credentials have expired and are renewed."""
    with lease.hold_lease(tmp_path) as held:
        refuse_reads(number)
        time.sleep(0.2)  # the thread of the lease looks several times
        held.last_read_time -= 60
        held.check()
        refuse_reads(0)
        assert held.thread.is_alive()
        (tmp_path / 'theirs').write_text(json.dumps(OTHER))
        (tmp_path / 'theirs').replace(tmp_path / lease.LEASE_NAME)
        held.last_read_time -= 60
        with pytest.raises(lease.LeaseLostError, match='17 on elsewhere'):
            held.check()


@pytest.mark.parametrize('number', [errno.EACCES, errno.EPERM])
def test_a_job_that_may_not_read_the_lease_does_not_begin(tmp_path, refuse_reads, number):
    written(tmp_path)
    refuse_reads(number)
    with pytest.raises(UserError, match=r'lease\.json cannot be read .*; let this account read it'):
        lease.LeaseWatcher(tmp_path / lease.LEASE_NAME)
    with pytest.raises(UserError), lease.hold_lease(tmp_path):
        pass


@pytest.mark.parametrize('replace', [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_a_lease_in_whose_place_no_file_is_is_lost(tmp_path, replace):
    with lease.hold_lease(tmp_path) as held:
        (tmp_path / lease.LEASE_NAME).unlink()
        replace(tmp_path / lease.LEASE_NAME)
        held.last_read_time -= 60
        with pytest.raises(lease.LeaseLostError, match=r'lease\.json'):
            held.check()


@pytest.mark.slow
@pytest.mark.parametrize('owner', [dict(machine=lease.get_machine_id(), pid=2**30), {}], ids=['here', 'elsewhere'])
def test_one_of_many_newcomers_gets_what_a_dead_job_has_left(tmp_path, owner):
    for _ in range(5):
        written(tmp_path, **owner)
        ready, done, got = threading.Barrier(8), threading.Event(), []

        def come(ready=ready, done=done, got=got):
            ready.wait()
            try:
                with lease.hold_lease(tmp_path) as held:
                    got.append(held)
                    done.wait(30)
                    held.check()
            except lease.LeaseLostError:
                got.append('superseded')
            except UserError:
                got.append('refused')
            if got.count('refused') == 7:
                done.set()

        crowd(8, come)
        assert got.count('refused') == 7


@pytest.mark.slow
def test_whoever_died_while_owners_changed_is_waited_for_once(tmp_path):
    (tmp_path / 'lease.lock').touch()
    with lease.hold_lease(tmp_path) as held:
        assert lease.read_owner_token(tmp_path) == held.token


@pytest.mark.slow
def test_of_many_that_have_waited_for_a_dead_one_while_owners_changed_one_goes_in_at_a_time(tmp_path):
    path, ready, inside, most = tmp_path / 'lease.lock', threading.Barrier(8), [], []
    path.touch()

    def come():
        ready.wait()
        with files.acquire_lock(path):
            inside.append(1)
            time.sleep(0.02)
            most.append(len(inside))
            inside.pop()

    crowd(8, come)
    assert most == [1] * 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_lock_is_not_broken_because_many_have_had_it_one_after_another(tmp_path):
    path, entered = tmp_path / 'lease.lock', threading.Event()
    path.touch()

    def come():
        with files.acquire_lock(path):
            entered.set()

    thread = threading.Thread(target=come)
    thread.start()
    for _ in range(3):
        assert not entered.wait(0.5)
        (tmp_path / 'next').touch()
        (tmp_path / 'next').replace(path)
    path.unlink()
    thread.join(10)
    assert entered.is_set()


@pytest.mark.slow
@pytest.mark.parametrize('content', ['', '{"tok', '{}', '[]', '5'])
def test_a_damaged_lease_holds_nobody_off_for_long(tmp_path, content):
    (tmp_path / lease.LEASE_NAME).write_text(content)
    with lease.hold_lease(tmp_path) as held:
        assert lease.read_owner_token(tmp_path) == held.token
