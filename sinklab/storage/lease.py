"""The lease of a folder: one job at a time, which lease.json names, may write there.

Its owner writes a heartbeat every HEARTBEAT_SECONDS: on a disk into the file that it holds open, in a bucket only
over the version that it wrote last. Once another job has replaced the lease, they no longer change it. Clocks of
hosts are never compared: an owner whose heartbeat changes while another job reads it is alive.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from sinklab.errors import UserError
from sinklab.storage import run_file_schemas
from sinklab.storage.atomic_write import open_writable_folder
from sinklab.storage.compare_and_swap import open_cas_file
from sinklab.storage.paths import is_remote, limit_retry_seconds
from sinklab.storage.untrusted_files import DamagedFileError, IrregularFileError

LEASE_NAME = 'lease.json'
HEARTBEAT_SECONDS = 2.0  # seconds between two heartbeats
REMOTE_HEARTBEAT_SECONDS = 10.0  # in a bucket, where each heartbeat is a request
# Seconds without a heartbeat, by the clock of the reader, until a process on another machine counts as dead. A call
# into C++ may keep the interpreter, and with it the thread that sends heartbeats.
OWNER_TIMEOUT_SECONDS = 60.0
DEFAULT_GRACE_SECONDS = 30.0  # seconds that a job may take to stop
GRACE_MARGIN_SECONDS = 10.0  # additional seconds until a stopping job counts as working
POLL_SECONDS = 0.1  # seconds between two reads; in a bucket longer, in the ratio of the heartbeats
LEASE_BYTES = 1024  # bytes of the file: overwritten by one write, it is readable at any time, also on a full disk

# Environment variables with the name of a cluster job, and with the number of its restarts.
CLUSTER_JOB_VARIABLES = (
    (('SLURM_CLUSTER_NAME', 'SLURM_JOB_ID'), 'SLURM_RESTART_COUNT'),
    (('JOBSET_NAMESPACE', 'JOBSET_NAME'), 'JOBSET_RESTART_ATTEMPT'),
)
UNREADABLE_OWNER = dict(token='', host='?', pid=0, machine='', born='', job='', attempt=0, beat=0.0, state='running')


class LeaseLostError(UserError):
    """Another job holds the lease of the folder.

    Nothing more may be written there, not even the outcome of this job.
    """


class Lease:
    """The lease of a folder, in which this job alone may write."""

    def __init__(self, folder: Path):
        self.path, self.token = folder / LEASE_NAME, uuid.uuid4().hex
        self.cas_file = open_cas_file(self.path, lambda text: get_token(parse_owner(text)) == self.token)
        self.is_remote = is_remote(folder)
        self.heartbeat_seconds = get_heartbeat_seconds(folder)
        self.content = get_process_identity() | dict(token=self.token, beat=0.0, state='running')
        self.start_time = self.last_read_time = time.monotonic()
        self.last_attempt_time = 0.0  # when `check` last tried to read the lease
        self.loss_reason = ''
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self.send_heartbeats, daemon=True)

    def acquire(self, grace_seconds: float) -> None:
        """Acquire the lease: wait for a stopping owner, replace a dead one, and refuse a working one.

        Args:
            grace_seconds: How many seconds a stopping owner may take.

        Raises:
            UserError: Another job works in the folder.
        """
        watcher, last_message = LeaseWatcher(self.path), ''
        while True:
            if watcher.is_free(self.content, grace_seconds):
                if self.replace_owner(watcher.owner):
                    break
            elif watcher.is_alive(grace_seconds):
                raise UserError(
                    f'{self.path.parent} is in use: {describe_owner(watcher.owner)} has held its lease for '
                    f'{watcher.owner["beat"]:.0f} s; wait for it, stop it, or give another folder'
                )
            elif (message := watcher.format_wait_message(grace_seconds)) not in ('', last_message):
                print(message, file=sys.stderr, flush=True)
                last_message = message
            time.sleep(POLL_SECONDS * (REMOTE_HEARTBEAT_SECONDS / HEARTBEAT_SECONDS if self.is_remote else 1))
            watcher.poll()
        self.thread.start()

    def replace_owner(self, owner: dict | None) -> bool:
        """Replace the lease of `owner` by this one; return False if that lease is no longer there."""
        return self.cas_file.compare_and_swap(
            lambda text: get_token(parse_owner(text)) == get_token(owner), self.encode()
        )

    def encode(self) -> str:
        self.content['beat'] = round(time.monotonic() - self.start_time, 1)
        return f'{json.dumps(self.content):{LEASE_BYTES - 1}}\n'

    def write_record(self) -> None:
        self.cas_file.overwrite(self.encode())

    def send_heartbeats(self) -> None:
        while not self.stop_event.wait(self.heartbeat_seconds):
            self.poll_owner()
            if self.loss_reason:
                return
            with contextlib.suppress(OSError):  # if heartbeats fail for long enough, another job takes the lease
                self.write_record()

    def poll_owner(self) -> None:
        """Read the lease; set `loss_reason` if it is no longer that of this job."""
        with contextlib.suppress(OSError):
            try:
                owner = read_owner(self.path)
            except IrregularFileError as error:  # only another job or a person can have put it there
                self.loss_reason = str(error)
                return
            except DamagedFileError:  # a permission may be restored, as any other error may end
                return
            self.last_read_time = time.monotonic()
            if get_token(owner) != self.token:
                self.loss_reason = (
                    f'{describe_owner(owner)} has taken over {self.path.parent}' if owner else f'{self.path} is gone'
                )

    def check(self) -> None:
        """Raise LeaseLostError if another job holds the folder. Call this before each write.

        Raises:
            LeaseLostError: Another job holds the folder, or the lease is gone.
        """
        max_age_seconds = 1.5 * REMOTE_HEARTBEAT_SECONDS if self.is_remote else HEARTBEAT_SECONDS
        # Without a recent read, this process may have been suspended and have lost the lease meanwhile.
        if time.monotonic() - max(self.last_read_time, self.last_attempt_time) > max_age_seconds:
            # A bucket that does not respond is not queried again at every step.
            self.last_attempt_time = time.monotonic() if self.is_remote else 0.0
            with limit_retry_seconds(HEARTBEAT_SECONDS):
                self.poll_owner()
        if self.loss_reason:
            raise LeaseLostError(f'{self.loss_reason}; this job has stopped without another change to the folder')

    def mark_stopping(self) -> None:
        """Tell the next job to wait for this one."""
        self.content['state'] = 'stopping'
        with contextlib.suppress(OSError), limit_retry_seconds(HEARTBEAT_SECONDS):
            self.write_record()

    def release(self) -> None:
        self.stop_event.set()
        self.thread.join()
        self.cas_file.release()


def get_heartbeat_seconds(path: Path) -> float:
    return REMOTE_HEARTBEAT_SECONDS if is_remote(path) else HEARTBEAT_SECONDS


class NullLease:
    """Lease of a process other than process 0, which holds the lease of the run."""

    def check(self) -> None:
        pass

    def mark_stopping(self) -> None:
        pass


class LeaseWatcher:
    """A watcher of the owner of a folder, which reads its lease repeatedly."""

    def __init__(self, path: Path):
        self.path, self.start_time, self.owner = path, time.monotonic(), read_owner(path)
        self.last_change_time, self.has_heartbeat = self.start_time, False

    def poll(self) -> None:
        previous_owner, read_start = self.owner, time.monotonic()
        self.owner = read_owner(self.path)
        self.last_change_time += time.monotonic() - read_start  # the time of a slow read does not count as silence
        self.has_heartbeat = (
            self.owner is not None
            and self.owner != previous_owner
            and get_token(self.owner) == get_token(previous_owner)
        )
        if self.owner != previous_owner:
            self.last_change_time = time.monotonic()
        # A lease that is read while it is written may be truncated; the next read then gives another text.
        if self.owner and is_unreadable(self.owner) and self.silent_seconds > get_heartbeat_seconds(self.path):
            run_file_schemas.warn_once(
                self.path,
                f'{self.path} is damaged; its owner counts as dead when the file has not changed for '
                f'{OWNER_TIMEOUT_SECONDS:.0f} s; if no job uses the folder, delete the file',
            )

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last heartbeat of an owner on another machine; 0 on this one."""
        return 0.0 if is_on_this_machine(self.owner) else time.monotonic() - self.last_change_time

    @property
    def is_gone(self) -> bool:
        """Return whether there is no lease, or its owner is dead or has been silent for too long."""
        return self.owner is None or is_dead(self.owner) or self.silent_seconds > OWNER_TIMEOUT_SECONDS

    def is_free(self, candidate: dict, grace_seconds: float) -> bool:
        owner = self.owner
        if owner is None or is_dead(owner):
            return True
        if self.is_stopping(grace_seconds):
            return False
        is_requeued = owner['job'] and owner['job'] == candidate['job'] and owner['attempt'] < candidate['attempt']
        return is_requeued or self.silent_seconds > OWNER_TIMEOUT_SECONDS

    def is_stopping(self, grace_seconds: float) -> bool:
        """Return whether the owner is stopping and still has time to do so."""
        is_in_time = time.monotonic() - self.start_time < grace_seconds + GRACE_MARGIN_SECONDS
        return self.owner['state'] == 'stopping' and self.silent_seconds < OWNER_TIMEOUT_SECONDS and is_in_time

    def is_alive(self, grace_seconds: float) -> bool:
        """Return whether the owner is known to run."""
        return not self.is_stopping(grace_seconds) and (self.has_heartbeat or is_on_this_machine(self.owner))

    def format_wait_message(self, grace_seconds: float) -> str:
        """Return a message that says what `acquire` waits for; '' if it is too early for one."""
        if self.is_stopping(grace_seconds):
            return f'waiting until {describe_owner(self.owner)} has stopped'
        message = f'waiting {OWNER_TIMEOUT_SECONDS:.0f} s for a heartbeat of {describe_owner(self.owner)}'
        return message if self.silent_seconds > 2 * get_heartbeat_seconds(self.path) else ''


@contextlib.contextmanager
def hold_lease(folder: Path, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> Iterator[Lease]:
    """Hold the lease of a folder; create the folder if it is missing, delete it again if it stays empty."""
    parents = () if is_remote(folder) else (folder, *folder.parents)
    created_folders = [path for path in parents if not os.path.exists(path)]
    folder_lease = Lease(folder)
    try:
        with open_writable_folder(folder):
            folder_lease.acquire(grace_seconds)
        try:
            yield folder_lease
        finally:
            folder_lease.release()
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in created_folders:
                path.rmdir()


def read_owner_token(folder: Path) -> str | None:
    """Return the token of the job that holds the folder; None if there is none."""
    return get_token(read_owner(folder / LEASE_NAME))


def is_unowned(folder: Path) -> bool:
    """Return whether the folder has no lease, or that of an ended process of this machine."""
    owner = read_owner(folder / LEASE_NAME)
    return owner is None or is_dead(owner)


def read_owner(path: Path) -> dict | None:
    """Read a lease; return None if there is none.

    Raises:
        IrregularFileError: Something other than a file is at the path.
        DamagedFileError: The file may not be read.
    """
    return parse_owner(open_cas_file(path).read())


def is_unreadable(owner: dict) -> bool:
    """Return whether a lease does not name its owner; its whole text is then its token."""
    return owner | dict(token='') == UNREADABLE_OWNER


def parse_owner(text: str | None) -> dict | None:
    if text is None:
        return None
    try:
        return UNREADABLE_OWNER | run_file_schemas.decode_run_file(text, 'lease', LEASE_NAME)
    except DamagedFileError:
        return UNREADABLE_OWNER | dict(token=text)


def get_token(owner: dict | None) -> str | None:
    return owner['token'] if owner else None


def describe_owner(owner: dict) -> str:
    if is_unreadable(owner):
        return f'a job that its {LEASE_NAME} does not name'
    return f'another job (process {owner["pid"]} on {owner["host"]})'


def get_process_identity() -> dict:
    """Return the fields of a lease that identify this process and its cluster job."""
    pid, (job, attempt) = os.getpid(), get_cluster_job(os.environ)
    return dict(
        host=socket.gethostname(),
        pid=pid,
        machine=get_machine_id(),
        born=get_process_start_time(pid),
        job=job,
        attempt=attempt,
    )


def get_cluster_job(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return (name, number of restarts) of the cluster job; ('', 0) outside a cluster."""
    for names, restart_variable in CLUSTER_JOB_VARIABLES:
        if names[-1] in environment:
            return '/'.join(environment.get(name, '') for name in names), int(environment.get(restart_variable) or 0)
    return '', 0


def is_dead(owner: dict) -> bool:
    """Return whether the owner's process is on this machine and has ended."""
    return is_on_this_machine(owner) and get_process_start_time(owner['pid']) != owner['born']


def is_on_this_machine(owner: dict) -> bool:
    """Return whether the owner's process is on this machine."""
    return bool(owner['machine']) and owner['machine'] == get_machine_id()


def get_machine_id() -> str:
    """Return an ID of this boot and PID namespace; '' if the system does not report it."""
    try:
        return f'{Path("/proc/sys/kernel/random/boot_id").read_text().strip()} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def get_process_start_time(pid: int) -> str:
    """Return the start time of a process in ticks, since PIDs are reused; '' once it has ended."""
    try:
        state, *fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if state in 'ZX' else fields[18]
