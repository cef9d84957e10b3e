"""Who may write in a folder: one job at a time, as its lease.json says.

Its owner says every BEAT seconds that it lives, in the file that it holds open, or in a bucket where it finds what it
has put there: once another job has put its own in the place, that reaches nobody. Clocks of hosts are never compared:
whoever's beat changes while we look is alive.
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

from sinklab.files import run_files
from sinklab.files.place import hasty, is_remote
from sinklab.files.regular import Damaged, Irregular
from sinklab.files.slot import slot
from sinklab.files.whole import writable
from sinklab.record import Refusal

NAME = 'lease.json'
BEAT = 2.0  # seconds between two beats
FAR = 10.0  # in a bucket, where each is a request
# Seconds without a beat, of our own clock, until a process out of sight is taken for dead: a call into C++ may keep
# the interpreter, and with it the thread that beats.
PATIENCE = 60.0
GRACE = 30.0  # seconds that a job which was told to stop may take
LATE = 10.0  # and more, before it counts as one that works on
LOOK = 0.1  # seconds between two looks; in a bucket as many times more as there are between two beats
SIZE = 1024  # bytes of the file: written over in one piece, it can be read at any time, and kept on a full disk

# The variables by which a cluster names a job, and counts its starts.
JOBS = (
    (('SLURM_CLUSTER_NAME', 'SLURM_JOB_ID'), 'SLURM_RESTART_COUNT'),
    (('JOBSET_NAMESPACE', 'JOBSET_NAME'), 'JOBSET_RESTART_ATTEMPT'),
)
UNREADABLE = dict(token='', host='?', pid=0, machine='', born='', job='', attempt=0, beat=0.0, state='running')


class Superseded(Refusal):
    """The folder is another job's now: nothing more may be written there, not even how this one has ended."""


class Lease:
    """A folder that this job alone may write in."""

    def __init__(self, folder: Path):
        self.path, self.token = folder / NAME, uuid.uuid4().hex
        self.slot = slot(self.path, lambda text: token(parsed(text)) == self.token)
        self.remote = is_remote(folder)
        self.beat = beat(folder)
        self.content = identity() | dict(token=self.token, beat=0.0, state='running')
        self.since = self.looked = time.monotonic()
        self.tried = 0.0  # to look, by who works
        self.lost = ''
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.live, daemon=True)

    def acquire(self, grace: float) -> None:
        """Waits for an owner that is stopping, takes the place of one that is dead, and refuses one that works."""
        watch, told = Watch(self.path), ''
        while True:
            if watch.is_free(self.content, grace):
                if self.swap(watch.owner):
                    break
            elif watch.is_alive(grace):
                raise Refusal(
                    f'{self.path.parent} is in use: {named(watch.owner)} has worked there for '
                    f'{watch.owner["beat"]:.0f} s; wait for it, stop it, or give another folder'
                )
            elif (words := watch.words(grace)) not in ('', told):
                print(words, file=sys.stderr, flush=True)
                told = words
            time.sleep(LOOK * (FAR / BEAT if self.remote else 1))
            watch.look()
        self.thread.start()

    def swap(self, owner: dict | None) -> bool:
        """Puts this lease in the place of an owner's; False where that is no longer there."""
        return self.slot.swap(lambda text: token(parsed(text)) == token(owner), self.text())

    def text(self) -> str:
        self.content['beat'] = round(time.monotonic() - self.since, 1)
        return f'{json.dumps(self.content):{SIZE - 1}}\n'

    def write(self) -> None:
        self.slot.write(self.text())

    def live(self) -> None:
        while not self.ended.wait(self.beat):
            self.look()
            if self.lost:
                return
            with contextlib.suppress(OSError):  # what cannot be read of us for long enough is taken from us
                self.write()

    def look(self) -> None:
        """Whether the lease is still this job's."""
        with contextlib.suppress(OSError):
            try:
                owner = read(self.path)
            except Irregular as error:  # nobody but another job, or a person, puts that into its place
                self.lost = str(error)
                return
            except Damaged:  # a permission, which may come back: as with every other error of the disk
                return
            self.looked = time.monotonic()
            if token(owner) != self.token:
                self.lost = f'{named(owner)} has taken over {self.path.parent}' if owner else f'{self.path} is gone'

    def check(self) -> None:
        """Raises Superseded once the folder is no longer this job's; to be asked before anything is written."""
        late = 1.5 * FAR if self.remote else BEAT
        if time.monotonic() - max(self.looked, self.tried) > late:  # this process may have been asleep as a whole
            self.tried = time.monotonic() if self.remote else 0.0  # what does not answer is not asked at every step
            with hasty(BEAT):
                self.look()
        if self.lost:
            raise Superseded(f'{self.lost}; this job has stopped, and has left the folder as it is')

    def stopping(self) -> None:
        """Tells the job that comes next to wait for this one."""
        self.content['state'] = 'stopping'
        with contextlib.suppress(OSError), hasty(BEAT):
            self.write()

    def release(self) -> None:
        self.ended.set()
        self.thread.join()
        self.slot.leave()


def beat(path: Path) -> float:
    return FAR if is_remote(path) else BEAT


class Elsewhere:
    """A lease that another process of the run has."""

    def check(self) -> None:
        pass

    def stopping(self) -> None:
        pass


class Watch:
    """What can be known of the owner of a folder by looking at its lease again and again."""

    def __init__(self, path: Path):
        self.path, self.since, self.owner = path, time.monotonic(), read(path)
        self.changed, self.beats = self.since, False

    def look(self) -> None:
        before, begun = self.owner, time.monotonic()
        self.owner = read(self.path)
        self.changed += time.monotonic() - begun  # while nothing can be seen, nobody is silent
        self.beats = self.owner is not None and self.owner != before and token(self.owner) == token(before)
        if self.owner != before:
            self.changed = time.monotonic()
        # What is read while it is written may be cut, and is another the next time.
        if self.owner and is_unreadable(self.owner) and self.silence > beat(self.path):
            run_files.warn(
                self.path,
                f'{self.path} is damaged; whoever has written it is taken for gone once it is the same for '
                f'{PATIENCE:.0f} s; where no job is at work there, delete it',
            )

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life of an owner out of sight."""
        return 0.0 if is_near(self.owner) else time.monotonic() - self.changed

    @property
    def is_gone(self) -> bool:
        """Whether nobody is at work there: no lease, or one of the dead, or of somebody who is not heard of."""
        return self.owner is None or is_dead(self.owner) or self.silence > PATIENCE

    def is_free(self, ours: dict, grace: float) -> bool:
        owner = self.owner
        if owner is None or is_dead(owner):
            return True
        if self.is_stopping(grace):
            return False
        is_requeued = owner['job'] and owner['job'] == ours['job'] and owner['attempt'] < ours['attempt']
        return is_requeued or self.silence > PATIENCE

    def is_stopping(self, grace: float) -> bool:
        """Whether it may still take the time that it has been given to stop."""
        in_time = time.monotonic() - self.since < grace + LATE
        return self.owner['state'] == 'stopping' and self.silence < PATIENCE and in_time

    def is_alive(self, grace: float) -> bool:
        """Whether it is at work, as far as can be seen now."""
        return not self.is_stopping(grace) and (self.beats or is_near(self.owner))

    def words(self, grace: float) -> str:
        """What is waited for, if it is worth telling."""
        if self.is_stopping(grace):
            return f'waiting until {named(self.owner)} has stopped'
        waits = f'waiting {PATIENCE:.0f} s for a sign of life of {named(self.owner)}'
        return waits if self.silence > 2 * beat(self.path) else ''


@contextlib.contextmanager
def lease(folder: Path, grace: float = GRACE) -> Iterator[Lease]:
    """A folder for one job; it is made if need be, and taken away again where nothing else has come into it."""
    parents = () if is_remote(folder) else (folder, *folder.parents)
    made = [path for path in parents if not os.path.exists(path)]
    held = Lease(folder)
    try:
        with writable(folder):
            held.acquire(grace)
        try:
            yield held
        finally:
            held.release()
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def seen(folder: Path) -> str | None:
    """The token of the job that has the folder, as it is seen from here."""
    return token(read(folder / NAME))


def is_left(folder: Path) -> bool:
    """Whether no job has the folder, or one whose process, which could be seen from here, has ended."""
    owner = read(folder / NAME)
    return owner is None or is_dead(owner)


def read(path: Path) -> dict | None:
    """Read a lease; None where there is none.

    Raises:
        Irregular: something else than a file is in its place.
        Damaged: it may not be read.
    """
    return parsed(slot(path).read())


def is_unreadable(owner: dict) -> bool:
    """Return whether a lease does not say whose it is: its whole text stands for that, as its token."""
    return owner | dict(token='') == UNREADABLE


def parsed(text: str | None) -> dict | None:
    if text is None:
        return None
    try:
        return UNREADABLE | run_files.decode_json(text, 'lease', NAME)
    except Damaged:
        return UNREADABLE | dict(token=text)


def token(owner: dict | None) -> str | None:
    return owner['token'] if owner else None


def named(owner: dict) -> str:
    if is_unreadable(owner):
        return f'a job whose {NAME} does not say which it is'
    return f'another job (process {owner["pid"]} on {owner["host"]})'


def identity() -> dict:
    """Which process this is, of which job of a cluster."""
    pid, (job, attempt) = os.getpid(), job_of(os.environ)
    return dict(host=socket.gethostname(), pid=pid, machine=machine(), born=born(pid), job=job, attempt=attempt)


def job_of(variables: Mapping[str, str]) -> tuple[str, int]:
    """(name, start) of a cluster's job; '' where this is none."""
    for names, count in JOBS:
        if names[-1] in variables:
            return '/'.join(variables.get(name, '') for name in names), int(variables.get(count) or 0)
    return '', 0


def is_dead(owner: dict) -> bool:
    """Whether its process can be looked at from here, and has ended."""
    return is_near(owner) and born(owner['pid']) != owner['born']


def is_near(owner: dict) -> bool:
    """Whether its process can be looked at from here."""
    return bool(owner['machine']) and owner['machine'] == machine()


def machine() -> str:
    """This boot of this machine, and what numbers processes in it; '' where the system does not say."""
    try:
        return f'{Path("/proc/sys/kernel/random/boot_id").read_text().strip()} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def born(pid: int) -> str:
    """When a process began, in ticks: numbers of processes are given again. '' once it has ended."""
    try:
        state, *fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if state in 'ZX' else fields[18]
