"""Leases: one job at a time in a folder, despite crashes, suspension and duplicate starts."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from thread_group import run_in_threads

from sinklab.errors import UserError
from sinklab.storage import lease

OTHER_OWNER = dict(host='elsewhere', machine='another boot', pid=17, born='5', job='', attempt=0, token='theirs')
REAL_OWNER_TIMEOUT = lease.OWNER_TIMEOUT_SECONDS
SLEEPING_SCRIPT = 'import sys, time; print("here", flush=True); time.sleep(600)'


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    """Shorten the time constants of leases."""
    for name, seconds in dict(
        HEARTBEAT_SECONDS=0.05, OWNER_TIMEOUT_SECONDS=0.5, GRACE_MARGIN_SECONDS=0.1, POLL_SECONDS=0.01
    ).items():
        monkeypatch.setattr(lease, name, seconds)
    for names, count in lease.CLUSTER_JOB_VARIABLES:
        for name in (*names, count):
            monkeypatch.delenv(name, raising=False)


def write_lease(folder, beat=0.0, state='running', **changes):
    """Write the lease of another job."""
    folder.mkdir(exist_ok=True)
    (folder / lease.LEASE_NAME).write_text(json.dumps(OTHER_OWNER | dict(beat=beat, state=state) | changes))


class Owner:
    """Job on another host that sends heartbeats for some seconds."""

    def __init__(self, folder, state='running', seconds=60.0, **changes):
        self.folder, self.state, self.changes, self.stop_event = folder, state, changes, threading.Event()
        self.end_time = time.monotonic() + seconds
        self.thread = threading.Thread(target=self.send_heartbeats)

    def __enter__(self):
        write_lease(self.folder, state=self.state, **self.changes)
        self.thread.start()

    def __exit__(self, *_):
        self.stop_event.set()
        self.thread.join()

    def send_heartbeats(self):
        beat = 0.0
        while time.monotonic() < self.end_time and not self.stop_event.wait(0.05):
            beat += 0.05
            if lease.read_owner_token(self.folder) != 'theirs':
                return
            write_lease(self.folder, beat, self.state, **self.changes)


@pytest.mark.slow
def test_lease_file_exists_and_is_refreshed_only_while_held(tmp_path):
    folder = tmp_path / 'some' / 'run'
    with lease.hold_lease(folder) as held_lease:
        assert lease.read_owner_token(folder) == held_lease.token
        first_record = lease.read_owner(folder / lease.LEASE_NAME)
        time.sleep(0.3)
        assert lease.read_owner(folder / lease.LEASE_NAME)['beat'] > first_record['beat']
        held_lease.check()
    assert list(tmp_path.iterdir()) == [], 'a folder that was made for nothing is taken away'
    with lease.hold_lease(folder):
        (folder / 'config.json').write_text('{}')
    assert [path.name for path in folder.iterdir()] == ['config.json']


def test_second_job_is_refused_with_process_host_and_age(tmp_path):
    message_pattern = rf'{tmp_path} .*process {os.getpid()} on .* \d+ s'
    with lease.hold_lease(tmp_path) as held_lease:
        with pytest.raises(UserError, match=message_pattern), lease.hold_lease(tmp_path):
            pass
        held_lease.check()
        assert lease.read_owner_token(tmp_path) == held_lease.token


def test_job_on_other_host_is_alive_while_heartbeat_changes(tmp_path):
    with Owner(tmp_path), pytest.raises(UserError, match=r'17 .*elsewhere'), lease.hold_lease(tmp_path):
        pass


@pytest.mark.slow
def test_job_on_other_host_is_dead_after_heartbeat_stops(tmp_path, capsys):
    write_lease(tmp_path, beat=1e9)
    start = time.monotonic()
    with lease.hold_lease(tmp_path) as held_lease:
        assert 0.4 < time.monotonic() - start < 5
        assert lease.read_owner_token(tmp_path) == held_lease.token
    message = 'for a heartbeat of another job (process 17 on elsewhere)\n'
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.slow
def test_stopping_job_killed_during_grace_is_replaced(tmp_path):
    """The job sends heartbeats before it is killed."""
    with Owner(tmp_path, 'stopping', seconds=0.15), lease.hold_lease(tmp_path, grace_seconds=0.3) as held_lease:
        assert lease.read_owner_token(tmp_path) == held_lease.token


@pytest.mark.parametrize('recycled', [False, True])
def test_dead_job_on_same_host_frees_lease_at_once_despite_pid_reuse(tmp_path, monkeypatch, recycled):
    monkeypatch.setattr(lease, 'OWNER_TIMEOUT_SECONDS', 60.0)
    with subprocess.Popen([sys.executable, '-c', SLEEPING_SCRIPT], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        start_time = lease.get_process_start_time(process.pid)
        write_lease(tmp_path, machine=lease.get_machine_id(), pid=process.pid, born='1' if recycled else start_time)
        if not recycled:
            with pytest.raises(UserError, match=rf'\b{process.pid}\b'), lease.hold_lease(tmp_path):
                pass
            process.kill()
            process.wait()
        with lease.hold_lease(tmp_path):
            pass
        process.kill()


@pytest.mark.slow
def test_new_job_waits_for_stopping_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT_SECONDS', 5.0)  # on a loaded machine a heartbeat may be late
    monkeypatch.setattr(lease, 'OWNER_TIMEOUT_SECONDS', 2.0)
    start = time.monotonic()
    with Owner(tmp_path, 'stopping', seconds=0.8), lease.hold_lease(tmp_path, grace_seconds=5.0):
        assert time.monotonic() - start > 0.7
    assert [('17' in line, 'elsewhere' in line) for line in capsys.readouterr().err.splitlines()] == [(True, True)]


def test_job_that_stops_longer_than_grace_is_treated_as_running(tmp_path):
    with (
        Owner(tmp_path, 'stopping'),
        pytest.raises(UserError, match='in use'),
        lease.hold_lease(tmp_path, grace_seconds=0.1),
    ):
        pass


@pytest.mark.parametrize(
    ('variables', 'job', 'is_same_job'),
    [
        (dict(SLURM_JOB_ID='7', SLURM_RESTART_COUNT='1'), '/7', True),
        (dict(SLURM_JOB_ID='7', SLURM_CLUSTER_NAME='big', SLURM_RESTART_COUNT='1'), 'big/7', True),
        (dict(JOBSET_NAME='a', JOBSET_NAMESPACE='n', JOBSET_RESTART_ATTEMPT='2'), 'n/a', True),
        (dict(SLURM_JOB_ID='7'), '/7', False),  # two steps of one job
        (dict(SLURM_JOB_ID='8', SLURM_RESTART_COUNT='1'), '/7', False),
    ],
)
def test_later_attempt_of_same_cluster_job_takes_over_lease(tmp_path, monkeypatch, variables, job, is_same_job):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Owner(tmp_path, job=job, attempt=0):
        if is_same_job:
            with lease.hold_lease(tmp_path) as held_lease:
                assert lease.read_owner_token(tmp_path) == held_lease.token
        else:
            with pytest.raises(UserError, match='in use'), lease.hold_lease(tmp_path):
                pass


def test_job_stops_after_takeover_and_leaves_new_lease_unchanged(tmp_path):
    with lease.hold_lease(tmp_path) as held_lease:
        (tmp_path / 'theirs').write_text(json.dumps(OTHER_OWNER))
        (tmp_path / 'theirs').replace(tmp_path / lease.LEASE_NAME)
        time.sleep(0.2)
        with pytest.raises(lease.LeaseLostError, match=r'17 .*elsewhere'):
            held_lease.check()
    assert (tmp_path / lease.LEASE_NAME).read_text() == json.dumps(OTHER_OWNER)


def test_check_rereads_lease_after_suspension(tmp_path):
    """The lease thread was suspended too and has not read the lease yet."""
    with lease.hold_lease(tmp_path) as held_lease:
        held_lease.stop_event.set()
        held_lease.thread.join()
        (tmp_path / lease.LEASE_NAME).unlink()
        held_lease.last_read_time -= 60
        with pytest.raises(lease.LeaseLostError, match=r'lease\.json'):
            held_lease.check()


@pytest.fixture
def refuse_reads(monkeypatch):
    """Yield a function that sets the error number with which opening a lease fails; 0 stops the failures."""
    error_number, open_file = [0], os.open

    def open_or_fail(path, flags, *arguments, **options):
        if error_number[0] and os.fspath(path).endswith(lease.LEASE_NAME):
            raise OSError(error_number[0], os.strerror(error_number[0]), path)
        return open_file(path, flags, *arguments, **options)

    monkeypatch.setattr(os, 'open', open_or_fail)
    yield lambda number: error_number.__setitem__(0, number)
    error_number[0] = 0


@pytest.mark.slow
@pytest.mark.parametrize('number', [errno.EACCES, errno.EPERM, errno.ENXIO, errno.EIO, errno.ESTALE])
def test_temporary_read_error_does_not_lose_lease(tmp_path, refuse_reads, number):
    """Kerberos or NFS credentials may expire and be renewed."""
    with lease.hold_lease(tmp_path) as held_lease:
        refuse_reads(number)
        time.sleep(0.2)  # the lease thread reads the file several times
        held_lease.last_read_time -= 60
        held_lease.check()
        refuse_reads(0)
        assert held_lease.thread.is_alive()
        (tmp_path / 'theirs').write_text(json.dumps(OTHER_OWNER))
        (tmp_path / 'theirs').replace(tmp_path / lease.LEASE_NAME)
        held_lease.last_read_time -= 60
        with pytest.raises(lease.LeaseLostError, match=r'17 .*elsewhere'):
            held_lease.check()


@pytest.mark.parametrize('number', [errno.EACCES, errno.EPERM])
def test_unreadable_lease_is_refused_at_start(tmp_path, refuse_reads, number):
    write_lease(tmp_path)
    refuse_reads(number)
    with pytest.raises(UserError, match=r'lease\.json'):
        lease.LeaseWatcher(tmp_path / lease.LEASE_NAME)
    with pytest.raises(UserError), lease.hold_lease(tmp_path):
        pass


@pytest.mark.parametrize('replace', [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_lease_replaced_by_non_file_is_lost(tmp_path, replace):
    with lease.hold_lease(tmp_path) as held_lease:
        (tmp_path / lease.LEASE_NAME).unlink()
        replace(tmp_path / lease.LEASE_NAME)
        held_lease.last_read_time -= 60
        with pytest.raises(lease.LeaseLostError, match=r'lease\.json'):
            held_lease.check()


@pytest.mark.slow
@pytest.mark.parametrize('owner', [dict(machine=lease.get_machine_id(), pid=2**30), {}], ids=['here', 'elsewhere'])
def test_one_of_many_new_jobs_takes_over_dead_lease(tmp_path, owner):
    for _ in range(5):
        write_lease(tmp_path, **owner)
        ready, finished, results = threading.Barrier(8), threading.Event(), []

        def compete(ready=ready, finished=finished, results=results):
            ready.wait()
            try:
                with lease.hold_lease(tmp_path) as held_lease:
                    finished.wait(30)
                    held_lease.check()
                    assert lease.read_owner_token(tmp_path) == held_lease.token
                    results.append('acquired')
            except lease.LeaseLostError:
                results.append('superseded')
            except UserError:
                results.append('refused')
            if results.count('refused') == 7:
                finished.set()

        run_in_threads(8, compete)
        assert sorted(results) == ['acquired', *['refused'] * 7]


@pytest.mark.slow
@pytest.mark.parametrize('content', ['', '{"tok', '{}', '[]', '5'])
def test_damaged_lease_is_replaced(tmp_path, content):
    (tmp_path / lease.LEASE_NAME).write_text(content)
    with lease.hold_lease(tmp_path) as held_lease:
        assert lease.read_owner_token(tmp_path) == held_lease.token
