"""Worker process of a supervised run: its process group on jax.distributed, and its exit.

Several processes find each other, and detect that one of them is lost, through the coordination service of jax, which
process 0 hosts. Its key-value store also holds the values of `all_gather`, the progress of slow processes and the
exit status of each process. The store works before the devices are known, which collectives of jax do not.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import math
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sinklab import startup_signals
from sinklab.errors import UserError
from sinklab.standard_streams import SafeStream
from sinklab.storage.lease import OWNER_TIMEOUT_SECONDS
from sinklab.supervisor.exit_status import (
    SAME_SIGNAL_SECONDS,
    ExitStatus,
    combine_exit_statuses,
    make_crash,
    make_early_stop,
    make_immediate_stop,
)

WORKER_VARIABLE = 'SINKLAB_SUPERVISED'
PR_SET_PDEATHSIG = 1  # of prctl on Linux: the signal to this process when its parent ends
JOIN_KEY, ALL_GATHER_KEY, PROGRESS_KEY = 'sinklab/join', 'sinklab/all_gather', 'sinklab/progress'
EXIT_KEY = 'sinklab/exit'
EXIT_BEGUN_KEY, RUN_EXIT_KEY, EXIT_BARRIER = 'sinklab/exit_begun', 'sinklab/run_exit', 'sinklab/exit_barrier'
CONNECT_MARGIN_SECONDS = 5.0  # jax waits for these seconds more than it is told to, which is at least one
MIN_JOIN_SECONDS = 1 + CONNECT_MARGIN_SECONDS
KEY_WAIT_MS = 3_600_000  # milliseconds of one wait for a key, which is repeated
ALL_GATHER_WAIT_MS = 1000 * 3_600_000  # of the wait for all processes in `all_gather`: one of them may prepare data
POLL_SECONDS = 0.1  # seconds between two looks at the exit statuses of other processes


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds; `step_multiple` is a factor of the usual duration of a step."""

    join: float = 300.0  # until all processes have connected
    step_multiple: float = 20.0
    min_step: float = 60.0  # the minimum timeout of a step
    untimed: float = 1800.0  # of an activity without a usual duration: starting, compiling, measuring, saving
    heartbeat: int = 10  # without a heartbeat until jax counts a process as lost
    settle: float = 2.0  # after the first failure, for others that may be its cause
    orderly_exit: float = 60.0  # after the first end that all processes agreed on: others may still be saving
    shutdown: float = 5.0  # for a process to exit after it was told to
    early_stop: float = 30.0  # for a process to meet the others, if it is stopped before that
    unresponsive: float = OWNER_TIMEOUT_SECONDS  # without a thread that runs Python; then other jobs take the lease

    def get_step_timeout(self, usual_seconds: float) -> float:
        return max(self.min_step, self.step_multiple * usual_seconds)

    @property
    def detection(self) -> float:
        """Seconds after which jax has ended all processes if one of them is lost."""
        return self.heartbeat + 3.0


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker, which its supervisor passes in an environment variable.

    Attributes:
        link: descriptor of a socket to the supervisor.
        terminal: descriptors of the terminal's standard output and error; [] if another process has the terminal.
        coordinator: address of jax's coordination service; None: a single process.
        bind: address on which process 0 listens; None: all interfaces.
        devices: ids of the local devices; None: all.
    """

    index: int
    count: int
    link: int
    terminal: list[int]
    coordinator: str | None
    bind: str | None
    devices: list[int] | None
    timeouts: Timeouts

    @classmethod
    def from_json(cls, text: str) -> 'WorkerSettings':
        values = json.loads(text)
        return cls(**values | dict(timeouts=Timeouts(**values['timeouts'])))


def is_supervised() -> bool:
    return WORKER_VARIABLE in os.environ


def make_process_group() -> 'SupervisedProcessGroup':
    """Return the process group of this worker, from the settings that its supervisor has put into the environment."""
    return SupervisedProcessGroup(WorkerSettings.from_json(os.environ.pop(WORKER_VARIABLE)))


# Activities without a usual duration. Their timeout is Timeouts.untimed.
UNTIMED_ACTIVITIES = ('starting', 'compiling', 'measuring', 'saving', 'restoring', 'ending')
UNBOUNDED_ACTIVITIES = ('preparing its data',)  # no timeout, since data can have any size
ACTIVITY_FORMATS = {'step': 'in step {step}', 'reading its batch': 'reading its batch of step {step}'}


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a process: its activity, step, the usual duration of that activity, and its start."""

    activity: str = 'starting'
    step: int = 0
    usual_seconds: float | None = None
    start_time: float = dataclasses.field(default_factory=time.monotonic)

    @classmethod
    def from_elapsed(cls, activity: str, step: int, usual_seconds: float | None, seconds: float) -> 'Progress':
        """Make the progress of another host, whose clock is not compared with that of this one."""
        return cls(activity, step, usual_seconds, time.monotonic() - seconds)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_time

    @property
    def rank(self) -> tuple[int, bool]:
        """The sort key of progress; a process that is further on has a greater one."""
        return self.step, self.activity == 'step'

    def get_timeout(self, timeouts: Timeouts) -> float:
        """Return how many seconds this activity may take; infinity if it has no limit."""
        if self.activity in UNBOUNDED_ACTIVITIES:
            return math.inf
        has_usual_time = self.usual_seconds is not None and self.activity not in UNTIMED_ACTIVITIES
        return timeouts.get_step_timeout(self.usual_seconds) if has_usual_time else timeouts.untimed

    def is_late(self, timeouts: Timeouts) -> bool:
        return self.seconds > self.get_timeout(timeouts)

    def __str__(self) -> str:
        text = ACTIVITY_FORMATS.get(
            self.activity, f'{self.activity} at step {{step}}' if self.step else self.activity
        )
        return text.format(step=self.step)


def describe_hang(
    own_index: int, progress: dict[int, Progress], names: list[str], timeouts: Timeouts
) -> ExitStatus | None:
    """Describe why a process is late, or return None if it waits for others that may take their time.

    Args:
        own_index: The index of the process that is late.
        progress: The known progress of processes by index. A process that has never been slow is missing.
        names: The names of all processes.
        timeouts: The timeouts.
    """
    own = progress[own_index]
    stragglers = [
        index for index in range(len(names)) if index not in progress or progress[index].rank < own.rank
    ]  # the processes that this one waits for
    if stragglers and all(
        index in progress
        and progress[index].activity in (*UNTIMED_ACTIVITIES, *UNBOUNDED_ACTIVITIES)
        and not progress[index].is_late(timeouts)
        for index in stragglers
    ):
        return None
    usual_text = '' if own.usual_seconds is None else f', usual {own.usual_seconds:.2g} s'
    details = [
        f'{names[index]} did not arrive'
        + (f' ({progress[index]} for {progress[index].seconds:.0f} s)' if index in progress else '')
        for index in stragglers
    ]
    reason = '; '.join(details) or ('all have arrived' if len(names) > 1 else 'it hangs')
    return ExitStatus('hung', f'{own} for {own.seconds:.0f} s{usual_text}: {reason}')


class SupervisedProcessGroup:
    """The process group of a supervised run. The process exits if its supervisor is lost."""

    def __init__(self, settings: WorkerSettings):
        self.settings, self.timeouts = settings, settings.timeouts
        self.process_index, self.process_count = settings.index, settings.count
        self.names = [f'process {index}' for index in range(self.process_count)]
        self.client, self.num_all_gathers, self.progress, self.is_progress_published = None, 0, Progress(), False
        self.exit_lock, self.has_joined, self.has_started = threading.Lock(), threading.Event(), False
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.enable(file=2)
        for name, descriptor in zip(('stdout', 'stderr'), settings.terminal, strict=False):
            stream = os.fdopen(descriptor, 'w', buffering=1, errors='backslashreplace')
            setattr(sys, name, SafeStream(stream))
        self.link, self.signals = socket.socket(fileno=settings.link), queue.SimpleQueue()
        startup_signals.set_exit_function(self.signals.put)  # a scheduler may signal all processes of a host
        self.start_thread(self.receive_signals)
        self.start_thread(self.handle_signals)

    def start_thread(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True).start()

    def initialize(self) -> None:
        """Connect to the other processes, and exchange names with them.

        jax aborts this process if one of the others does not connect in time.

        Raises:
            UserError: This process and process 0 have different numbers of processes.
        """
        if self.process_count > 1:
            self.initialize_distributed()
            self.start_thread(self.wait_for_run_exit)
            if self.process_index == 0:
                self.start_thread(self.decide_run_exit)
            name = f'process {self.process_index} (host {get_host_name()}, pid {os.getpid()})'
            self.set_key(f'{JOIN_KEY}/{self.process_index}', [self.process_count, name])
            count, _ = self.wait_for_key(f'{JOIN_KEY}/0')
            if count != self.process_count:
                raise UserError(
                    f'it has --processes={self.process_count}, but process 0 has {count}; give the same number to all'
                )
            self.names = [self.wait_for_key(f'{JOIN_KEY}/{index}')[1] for index in range(self.process_count)]
            self.report(names=self.names)
        self.has_joined.set()
        self.start_thread(self.watch_progress)

    def initialize_distributed(self) -> None:
        import jax

        # Its service would catch SIGTERM. The train step distributes requests to stop, for SIGINT as well.
        jax.config.update('jax_enable_preemption_service', False)
        jax.distributed.initialize(
            self.settings.coordinator,
            self.process_count,
            self.process_index,
            local_device_ids=self.settings.devices,
            cluster_detection_method='deactivate',
            coordinator_bind_address=self.settings.bind,
            initialization_timeout=max(1, math.ceil(self.timeouts.join - CONNECT_MARGIN_SECONDS)),
            heartbeat_timeout_seconds=self.timeouts.heartbeat,
        )
        # Private: jax has no public function for its key-value store.
        from jax._src.distributed import global_state

        self.client = global_state.client

    def set_key(self, key: str, value: Any) -> None:
        self.client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def wait_for_key(self, key: str) -> Any:
        """Return the value of a key as soon as a process has set it."""
        while True:
            try:
                return json.loads(self.client.blocking_key_value_get(key, KEY_WAIT_MS))
            except RuntimeError as error:  # jax.errors.JaxRuntimeError
                if 'DEADLINE_EXCEEDED' not in str(error):
                    raise

    def read_values(self, folder: str) -> dict[int, Any]:
        """Return the values that processes have set in a folder of keys, by process index."""
        pairs = self.client.key_value_dir_get(f'{folder}/') if self.client else []
        return {int(key.rpartition('/')[2]): json.loads(value) for key, value in pairs}

    def all_gather(self, name: str, value: Any) -> list[Any]:
        if self.process_count == 1:
            return [value]
        self.num_all_gathers += 1
        folder = f'{ALL_GATHER_KEY}/{self.num_all_gathers}'
        self.set_key(f'{folder}/{self.process_index}', [name, value])
        self.client.wait_at_barrier(folder, ALL_GATHER_WAIT_MS)
        answers = self.read_values(folder)
        for index, (other_name, _) in answers.items():
            if other_name != name:
                raise RuntimeError(f'reached {name!r} when process {index} reached {other_name!r}')
        # All processes have read the values of the gather before this one.
        self.client.key_value_delete(f'{ALL_GATHER_KEY}/{self.num_all_gathers - 1}/{self.process_index}')
        return [answers[index][1] for index in range(self.process_count)]

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        self.progress = Progress(activity, int(step), None if usual_seconds is None else float(usual_seconds))
        self.has_started = self.has_started or has_graceful_sigterm_handler()

    def watch_progress(self) -> None:
        """Publish the progress of this process if it is slow, and end the run if it hangs.

        This runs in a thread of its own, since the main thread may wait for other processes. If a call into C++ keeps
        this thread from running for `timeouts.unresponsive`, faulthandler ends the process.
        """
        interval = min(1.0, self.timeouts.min_step / 8)
        while True:
            faulthandler.dump_traceback_later(self.timeouts.unresponsive, exit=True, file=2)
            progress = self.progress
            with contextlib.suppress(RuntimeError):  # without the service, jax aborts this process
                self.publish_progress(progress)
                if progress.is_late(self.timeouts):
                    others = self.read_values(PROGRESS_KEY)
                    known = {index: Progress.from_elapsed(*values) for index, values in others.items()}
                    known[self.process_index] = progress
                    if hang := describe_hang(self.process_index, known, self.names, self.timeouts):
                        self.exit(hang)
            time.sleep(interval)

    def publish_progress(self, progress: Progress) -> None:
        """Publish the progress of this process while it is slow, and withdraw it afterwards."""
        key, is_slow = f'{PROGRESS_KEY}/{self.process_index}', progress.seconds > self.timeouts.min_step / 4
        if self.client and is_slow:
            self.set_key(key, [progress.activity, progress.step, progress.usual_seconds, progress.seconds])
        elif self.client and self.is_progress_published:
            self.client.key_value_delete(key)
        self.is_progress_published = is_slow

    def receive_signals(self) -> None:
        """Receive the signals that the supervisor passes on, until it ends."""
        while signums := self.link.recv(1):
            self.signals.put(signums[0])
        os._exit(ExitStatus('lost').exit_code)

    def handle_signals(self) -> None:
        """Handle signals of the supervisor, and those that arrive before the training loop handles them.

        The first one goes to the training loop, which saves and stops. Before it runs, the process exits, but waits
        a moment for the other processes, which would wait for this one in vain. A later signal, more than
        SAME_SIGNAL_SECONDS after the first, ends the run at once.
        """
        first_time = None
        while signum := self.signals.get():
            now = time.monotonic()
            if first_time is not None and now - first_time > SAME_SIGNAL_SECONDS:
                self.exit(make_immediate_stop(signum))
            elif first_time is None:
                first_time = now
                if has_graceful_sigterm_handler():
                    self.has_started = True
                    self.report(is_stopping=True)
                    os.kill(os.getpid(), signum)
                elif not self.has_started:
                    self.start_thread(functools.partial(self.stop_early, signum))

    def stop_early(self, signum: int) -> None:
        self.has_joined.wait(self.timeouts.early_stop)
        self.exit(make_early_stop(signum))

    def exit(self, exit_status: ExitStatus) -> NoReturn:
        """Exit with the exit status of the run, which process 0 decides from those of all processes."""
        if self.exit_lock.acquire(blocking=False):  # otherwise another thread already ends the process
            if not self.client:
                self.exit_now(exit_status)
            self.report_progress('ending', self.progress.step)
            with contextlib.suppress(RuntimeError):  # without the service, jax aborts this process
                self.set_key(f'{EXIT_KEY}/{self.process_index}', dataclasses.asdict(exit_status))
                self.set_key(EXIT_BEGUN_KEY, True)
        threading.Event().wait()  # `wait_for_run_exit` ends the process

    def decide_run_exit(self) -> None:
        """Decide how the run ends, in a thread of process 0, once a process has set its exit status.

        After the first failure it waits a moment for the exit statuses of others: one of them may be the cause. If
        the first one may be the effect of a lost process, it waits until jax has ended the run in that case.
        """
        try:
            exit_status = self.wait_for_exit_statuses()
        except Exception as error:  # the other processes would wait for ever
            self.exit_now(make_crash(error))
        self.set_key(RUN_EXIT_KEY, dataclasses.asdict(exit_status))

    def wait_for_exit_statuses(self) -> ExitStatus:
        """Wait for the exit statuses of processes, and return that of the run."""
        self.wait_for_key(EXIT_BEGUN_KEY)
        deadlines: dict[int, float] = {}
        while True:
            statuses = {index: ExitStatus(**values) for index, values in self.read_values(EXIT_KEY).items()}
            for index, status in statuses.items():
                deadlines.setdefault(index, time.monotonic() + self.get_settle_seconds(status))
            if len(statuses) == self.process_count or time.monotonic() > min(deadlines.values()):
                return combine_exit_statuses(statuses, self.names)
            time.sleep(POLL_SECONDS)

    def get_settle_seconds(self, exit_status: ExitStatus) -> float:
        """Return for how many seconds process 0 waits for other exit statuses after this one."""
        if exit_status.cause == 'done':
            return math.inf
        if exit_status.cause == 'runtime':  # an effect of a lost process, perhaps, which jax has yet to notice
            return self.timeouts.detection
        return self.timeouts.orderly_exit if exit_status.orderly else self.timeouts.settle

    def wait_for_run_exit(self) -> None:
        """Exit in the same way as all other processes, as soon as process 0 has decided how."""
        exit_status = None
        while exit_status is None:
            with contextlib.suppress(RuntimeError):  # without the service, jax aborts this process
                exit_status = ExitStatus(**self.wait_for_key(RUN_EXIT_KEY))
            time.sleep(POLL_SECONDS)
        self.report_exit(exit_status)
        with contextlib.suppress(RuntimeError):  # once process 0 exits, jax aborts all others
            self.client.wait_at_barrier(EXIT_BARRIER, int(1000 * self.timeouts.shutdown))
        os._exit(exit_status.exit_code)

    def exit_now(self, exit_status: ExitStatus) -> NoReturn:
        """Exit at once, without jax's shutdown, which would wait for processes that may be gone."""
        self.report_exit(exit_status)
        os._exit(exit_status.exit_code)

    def report_exit(self, exit_status: ExitStatus) -> None:
        """Tell the supervisor how this process ends, and write the stacks of its threads after a failure."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if exit_status.is_failure:
            faulthandler.dump_traceback(file=2)
        self.report(exit_status=dataclasses.asdict(exit_status))

    def report(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b'\n')


def get_host_name() -> str:
    """Return the host name in printable ASCII, with `?` for all other characters."""
    return re.sub('[^ -~]', '?', socket.gethostname())[:255]


def has_graceful_sigterm_handler() -> bool:
    """Return whether SIGTERM has a handler other than those that end the process at once."""
    return signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, startup_signals.exit_on_signal, None)
