"""The supervisor of one worker process: starts it, watches it, restarts it, and records how it ended.

A supervisor opens no port. Processes of a run meet in the coordination service of jax, which the worker of process 0
hosts. If a worker ends without an exit status, its supervisor reads the cause from the log of jax.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.atomic_write import append_text, open_writable_folder
from sinklab.storage.lease import is_unowned
from sinklab.storage.paths import limit_retry_seconds
from sinklab.storage.untrusted_files import DamagedFileError
from sinklab.supervisor.cluster import ProcessInfo, is_loopback
from sinklab.supervisor.exit_status import (
    SAME_SIGNAL_SECONDS,
    STOPPING_MESSAGE,
    ExitStatus,
    make_early_stop,
    make_exit_status,
    make_immediate_stop,
)
from sinklab.supervisor.worker import WORKER_VARIABLE, Timeouts, WorkerSettings, get_host_name

BIND_VARIABLE = 'JAX_COORDINATOR_BIND_ADDRESS'  # of jax; a user may set it to choose another interface
LOG_TAIL_BYTES = 100_000  # bytes of the end of a worker's log that are kept
STORAGE_TIMEOUT_SECONDS = 10.0  # seconds for which requests to a bucket are retried: nothing should wait for longer
MAX_FRUITLESS = 5  # attempts in a row without a new checkpoint, restarts by a scheduler included
MAX_FRUITLESS_RESTARTS = 3  # the same, counting only restarts by the supervisors
POLL_SECONDS, RETRY_SECONDS = 0.2, 1.0  # seconds between two looks at a worker; until a new attempt to connect
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
NOT_LOCAL_ERRNOS = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT  # no interface of this machine has the address
# Messages of jax's coordination service (xla/pjrt/distributed), in the log of a process that it has aborted.
UNHEALTHY_PATTERN = re.compile(r'stopped sending heartbeats\):\s*((?:\S*task:)?\d+(?:,?\s+(?:\S*task:)?\d+)*)\s')
RESTARTED_PATTERN = re.compile(r'(\d+) unexpectedly tried to connect')
SERVICE_LOST_TEXT = 'Failed to send RPC to coordination service'
JOIN_TIMEOUT_TEXT = 'CoordinationService/RegisterTask'
UNRESPONSIVE_PATTERN = re.compile(r'^Timeout \(\d+:\d\d:\d\d', re.MULTILINE)  # of faulthandler.dump_traceback_later


class WorkerProcess:
    """A worker process, which trains.

    In process 0 its lines for the user go to the terminal. All other output goes to `log_file`.
    """

    def __init__(
        self,
        command: list[str],
        process_info: ProcessInfo,
        bind_address: str | None,
        timeouts: Timeouts,
        print_line: Callable[[str], None],
    ):
        self.process_info, self.timeouts, self.print_line = process_info, timeouts, print_line
        self.link, worker_sock = socket.socketpair()
        self.log_file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker
        terminal = [] if process_info.index else [os.dup(1), os.dup(2)]
        settings = WorkerSettings(
            index=process_info.index,
            count=process_info.count,
            link=worker_sock.fileno(),
            terminal=terminal,
            coordinator=process_info.address if process_info.count > 1 else None,
            bind=bind_address,
            devices=process_info.devices,
            timeouts=timeouts,
        )
        self.process = subprocess.Popen(
            command,
            env=os.environ | {WORKER_VARIABLE: json.dumps(dataclasses.asdict(settings))},
            pass_fds=[worker_sock.fileno(), *terminal],
            stdin=subprocess.DEVNULL,
            stdout=self.log_file,
            stderr=self.log_file,
            process_group=0,  # the supervisor passes on Ctrl-C of the terminal
        )
        for descriptor in (worker_sock.detach(), *terminal):
            os.close(descriptor)
        self.names: list[str] = []  # of all processes, once they have met
        self.reported_status: ExitStatus | None = None
        self.partial_line, self.suspended_since = b'', None

    @property
    def name(self) -> str:
        if self.names:
            return self.names[self.process_info.index]
        return f'process {self.process_info.index} (host {get_host_name()}, pid {self.process.pid})'

    @property
    def has_joined(self) -> bool:
        return bool(self.names) or self.process_info.count == 1

    def poll(self) -> ExitStatus | None:
        """Return the exit status of the worker, or None while it runs. A suspended worker is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(POLL_SECONDS)
        self.read_reports()
        if self.process.returncode is not None:
            return self.reported_status or self.classify_exit()
        if read_process_state(self.process.pid) not in 'tT':
            self.suspended_since = None
            return None
        now = time.monotonic()
        self.suspended_since = self.suspended_since or now
        if now - self.suspended_since < self.timeouts.heartbeat:
            return None
        self.kill()
        suspended_status = ExitStatus('frozen', f'suspended for {self.timeouts.heartbeat} s')
        return self.reported_status or self.add_name(suspended_status)

    def read_reports(self) -> None:
        """Read what the worker has reported until now."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self.link.recv(1 << 16, socket.MSG_DONTWAIT):
                *lines, self.partial_line = (self.partial_line + data).split(b'\n')
                for line in lines:
                    message = json.loads(line)
                    self.names = message.get('names', self.names)
                    if 'exit_status' in message:
                        self.reported_status = ExitStatus(**message['exit_status'])
                    if message.get('is_stopping') and self.process_info.index:  # process 0 prints this itself
                        self.print_line(STOPPING_MESSAGE)

    def classify_exit(self) -> ExitStatus:
        """Return the exit status of a worker that reported none, from its exit code and its log."""
        log_tail = self.read_log_tail()
        exit_status = make_exit_status(self.process.returncode, log_tail)
        if abort_status := self.classify_abort(log_tail):
            return abort_status
        if exit_status.cause == 'crashed' and UNRESPONSIVE_PATTERN.search(log_tail):
            exit_status = ExitStatus('frozen', f'no Python code ran for {self.timeouts.unresponsive:.0f} s')
        elif exit_status.cause == 'crashed' and self.process_info.count > 1:  # as the other processes see it
            exit_status = dataclasses.replace(exit_status, cause='lost')
        return self.add_name(exit_status)

    def add_name(self, exit_status: ExitStatus) -> ExitStatus:
        """Add the name of this process to an exit status of a run of several processes."""
        if self.process_info.count == 1:
            return exit_status
        return exit_status.replace_message(f'{self.name}: {exit_status.message}')

    def classify_abort(self, log_tail: str) -> ExitStatus | None:
        """Return the exit status of a worker that jax has aborted, because of another process; None if unknown."""
        names = dict(enumerate(self.names or (f'process {index}' for index in range(self.process_info.count))))
        if match := UNHEALTHY_PATTERN.search(log_tail):
            lost_names = [names.get(int(index), index) for index in re.findall(r'\d+(?=[\s,]|$)', match[1])]
            return ExitStatus('lost', f'{", ".join(lost_names)}: no heartbeat for {self.timeouts.heartbeat} s')
        if match := RESTARTED_PATTERN.search(log_tail):
            return ExitStatus('lost', f'another process has connected as {names.get(int(match[1]), match[1])}')
        if not self.has_joined and JOIN_TIMEOUT_TEXT in log_tail:
            return self.describe_missing()
        if SERVICE_LOST_TEXT in log_tail:
            return ExitStatus('lost', f'{names[0]}: gone, or out of reach at {self.process_info.address}')
        return None

    def describe_missing(self) -> ExitStatus:
        """Describe that processes have not met in time; jax does not say which of them is missing."""
        info, seconds = self.process_info, f'{self.timeouts.join:.0f} s'
        if info.index == 0:
            return ExitStatus(
                'refused',
                f'not all of the {info.count} processes connected to {info.address} within {seconds}; start all of '
                'them, with the same --processes',
            )
        return ExitStatus(
            'refused',
            f'not all of the {info.count} processes were there within {seconds}, or process 0 is not at '
            f'{info.address}; start all of them, with its address in --coordinator and the same --processes',
        )

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(OSError):
            self.link.send(bytes([signum]), socket.MSG_DONTWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.read_reports()

    def read_log_tail(self) -> str:
        """Return the end of the log file of the worker."""
        size = os.fstat(self.log_file.fileno()).st_size
        return os.pread(self.log_file.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(
            errors='replace'
        )


def read_process_state(pid: int) -> str:
    """Return the state of a process as a letter of /proc; `?` if there is no such process."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except (OSError, IndexError):
        return '?'


class RestartPolicy:
    """Decision whether a run restarts, and record of how it ended.

    Each supervisor decides for its own worker, from its exit status and the checkpoints in the folder of the run.
    Processes that end together have the same exit status. Process 0 alone writes the record.

    Args:
        run_dir: The run directory.
        is_this_run: Returns whether the folder holds this run; nothing is written to the folder of another run.
        find_newest_step: Returns the newest step of the folder with a complete checkpoint; None if there is none.
        restarts: How many times the supervisors may restart the run.
    """

    def __init__(
        self,
        run_dir: RunDir,
        is_this_run: Callable[[], bool],
        find_newest_step: Callable[[], int | None],
        restarts: int,
    ):
        self.run_dir, self.is_this_run, self.find_newest_step, self.restarts = (
            run_dir,
            is_this_run,
            find_newest_step,
            restarts,
        )
        self.num_fruitless = self.num_fruitless_here = 0
        self.newest_step = None
        self.newest_step = self.poll_newest_step()
        with contextlib.suppress(OSError, ValueError):
            last_outcome = run_dir.read_json('outcome')
            if last_outcome.get('checkpoint') == self.newest_step:
                self.num_fruitless = last_outcome.get('fruitless', 0)

    def poll_newest_step(self) -> int | None:
        """Return the newest complete step; the last known one if the storage fails or a file is damaged."""
        with contextlib.suppress(OSError, ValueError), limit_retry_seconds(STORAGE_TIMEOUT_SECONDS):
            return self.find_newest_step()
        return self.newest_step

    def decide_restart(self, exit_status: ExitStatus) -> tuple[ExitStatus, bool]:
        """Decide whether all processes restart after an end.

        Only an end of kind `lost` leads to a restart. After a few attempts in a row without a new checkpoint the run
        ends with the cause `fruitless`.

        Returns:
            The exit status to report, and whether the processes restart.
        """
        if exit_status.kind != 'lost':
            return exit_status, False
        newest_step = self.poll_newest_step()
        if newest_step != self.newest_step:
            self.newest_step, self.num_fruitless, self.num_fruitless_here = newest_step, 0, 0
        self.num_fruitless, self.num_fruitless_here = self.num_fruitless + 1, self.num_fruitless_here + 1
        if self.num_fruitless >= MAX_FRUITLESS or self.num_fruitless_here >= MAX_FRUITLESS_RESTARTS:
            return ExitStatus(
                'fruitless',
                f'{exit_status.message}; that was attempt {max(self.num_fruitless, self.num_fruitless_here)} '
                'in a row without a new checkpoint',
            ), False
        is_restarting = self.restarts > 0
        self.restarts -= is_restarting
        return exit_status, is_restarting

    def write_outcome(self, exit_status: ExitStatus) -> None:
        """Write outcome.json unless process 0 has already recorded this end.

        Process 0 may have failed before it could write, or may not know how the others ended. Nothing is written for
        a refused run, while a job holds the folder, or if the folder holds another run. The end of a lost run is
        always written, with its count of fruitless attempts. Errors of the storage are ignored.
        """
        fruitless_field = (
            dict(fruitless=self.num_fruitless)
            if exit_status.kind == 'lost' or exit_status.cause == 'fruitless'
            else {}
        )
        with contextlib.suppress(OSError, ValueError), limit_retry_seconds(STORAGE_TIMEOUT_SECONDS):
            last_outcome = self.read_outcome()
            is_recorded = (last_outcome.get('kind'), last_outcome.get('exit_code')) == (
                exit_status.kind,
                exit_status.exit_code,
            ) and not fruitless_field
            if (
                not is_recorded
                and exit_status.kind != 'refused'
                and is_unowned(self.run_dir.path)
                and self.is_this_run()
            ):
                outcome = dict(
                    kind=exit_status.kind,
                    step=self.read_last_step(),
                    checkpoint=self.poll_newest_step(),
                    message=exit_status.message,
                )
                self.run_dir.write_json('outcome', outcome | dict(exit_code=exit_status.exit_code) | fruitless_field)

    def read_outcome(self) -> dict:
        """Return the content of outcome.json; an empty dict if the file is missing or damaged."""
        try:
            return self.run_dir.read_json('outcome')
        except (FileNotFoundError, DamagedFileError):
            return {}

    def read_last_step(self) -> int:
        """Return the step of the last line of metrics.jsonl; 0 if there is none or the file is damaged."""
        try:
            return next((line['step'] for line in reversed(self.run_dir.read_metric_lines())), 0)
        except DamagedFileError:
            return 0


def log_failure(run_dir: RunDir, index: int, exit_status: ExitStatus, log_tail: str) -> None:
    """Append the reason of a failure and the end of the worker's log to processes/INDEX.log."""
    with contextlib.suppress(OSError, UserError), limit_retry_seconds(STORAGE_TIMEOUT_SECONDS):
        if not run_dir.has_run():
            return
        with open_writable_folder(run_dir.path / 'processes'):
            append_text(
                run_dir.path / 'processes' / f'{index}.log',
                f'{time.strftime("%Y-%m-%dT%H:%M:%S%z")} {exit_status.message}\n{log_tail}\n',
            )


def choose_bind_address(process_info: ProcessInfo) -> tuple[str | None, str]:
    """Choose the address on which jax listens in process 0, and check that the port is free.

    jax itself would share a port that another process of this user has opened.

    Returns:
        The address of the interface that has the address of process 0, as HOST:PORT, and ''; or None for all
        interfaces, and why.

    Raises:
        UserError: The port is in use, or this user may not open it. The cause is the OSError.
    """
    host, port = process_info.host, process_info.port
    try:
        addresses = dict.fromkeys(
            (family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        check_port(socket.AF_INET, ('', port))
        return None, f'{host} has no address on this machine ({error.strerror})'
    reason = ''
    if not is_loopback(host) and all(is_loopback(address[0]) for _, address in addresses):
        addresses, reason = {}, f'{host} is {next(iter(addresses))[1][0]} on this machine'
    for family, address in addresses:
        try:
            check_port(family, address)
            return dataclasses.replace(process_info, host=address[0]).address, ''
        except UserError as error:
            if error.__cause__.errno not in NOT_LOCAL_ERRNOS:
                raise
            reason = f'{address[0]}: {os.strerror(error.__cause__.errno)}'
    check_port(socket.AF_INET, ('', port))
    return None, reason


def check_port(family: int, address: tuple) -> None:
    """Raise UserError, caused by the OSError, if an address of this machine cannot be opened."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise UserError(
            f'port {address[1]} cannot be opened for the other processes ({os.strerror(error.errno)}); give another '
            'port in --coordinator to all of them, or stop the program that uses it'
        ) from error


class Supervisor:
    """The supervisor of a worker process.

    Args:
        process_info: The index and count of this process.
        command: The command line of the worker.
        timeouts: The timeouts of the processes.
        on_failure: Called with the exit status of a worker that failed and the end of its log.
        print_line: Prints a line for the user.
        decide_restart: Takes an exit status; returns the one to report, and whether the worker restarts.
    """

    def __init__(
        self,
        process_info: ProcessInfo,
        command: list[str],
        timeouts: Timeouts,
        on_failure: Callable[[ExitStatus, str], None],
        print_line: Callable[[str], None],
        decide_restart: Callable[[ExitStatus], tuple[ExitStatus, bool]],
    ):
        self.process_info, self.command, self.timeouts = process_info, command, timeouts
        self.on_failure, self.print_line, self.decide_restart = on_failure, print_line, decide_restart
        self.worker: WorkerProcess | None = None
        self.have_joined = False  # whether all processes have met once
        self.stop_signal: int | None = None
        self.first_signal_time, self.kill_time = 0.0, None

    def run(self) -> ExitStatus:
        """Run the worker until it has ended for good, and return the exit status of the run."""
        with self.handle_signals():
            while True:
                exit_status, is_restarting = self.decide_restart(self.run_worker())
                if self.stop_signal or not is_restarting:
                    return exit_status
                self.print_line(f'{exit_status.message}; starting again')
                if exit_status.cause in ('killed', 'aborted', 'frozen'):  # until jax has told the other processes
                    self.sleep(self.timeouts.detection)

    def run_worker(self) -> ExitStatus:
        """Run a worker until it ends, and return its exit status.

        It is started again if another run, which is still ending, keeps it from meeting the other processes. Once
        they have met, a restarted worker that does not meet them counts as lost.
        """
        deadline = time.monotonic() + self.timeouts.join
        while True:
            bind_address = self.choose_bind_address()
            if self.stop_signal:
                return (make_immediate_stop if self.have_joined else make_early_stop)(self.stop_signal)
            self.worker = WorkerProcess(self.command, self.process_info, bind_address, self.timeouts, self.print_line)
            if self.stop_signal:  # it has arrived in the meantime
                self.worker.send_signal(self.stop_signal)
            exit_status = self.wait_for_worker()
            if exit_status.is_failure:
                self.on_failure(exit_status, f'{exit_status.trace}{self.worker.read_log_tail()}')
            if self.worker.has_joined:
                self.have_joined = True
                return exit_status
            if exit_status.cause != 'lost' or time.monotonic() > deadline:
                return dataclasses.replace(exit_status, cause='lost') if self.have_joined else exit_status
            self.sleep(RETRY_SECONDS)

    def wait_for_worker(self) -> ExitStatus:
        """Wait for the end of the worker; kill it if it does not end after a second signal."""
        while True:
            if exit_status := self.worker.poll():
                return exit_status
            if self.kill_time and time.monotonic() > self.kill_time:
                self.worker.kill()
                return self.worker.reported_status or make_immediate_stop(self.stop_signal)

    def choose_bind_address(self) -> str | None:
        """Choose the bind address of process 0; wait while a run that is ending still has the port."""
        if self.process_info.index or self.process_info.count == 1 or BIND_VARIABLE in os.environ:
            return None
        deadline = time.monotonic() + 2 * self.timeouts.shutdown
        while not self.stop_signal:
            try:
                bind_address, reason = choose_bind_address(self.process_info)
                if reason:
                    self.print_line(f'process 0 listens on all interfaces of this machine ({reason})')
                return bind_address
            except UserError as error:
                if time.monotonic() > deadline or error.__cause__.errno != errno.EADDRINUSE:
                    raise
            self.sleep(POLL_SECONDS)
        return None

    def sleep(self, seconds: float) -> None:
        """Sleep, until a signal arrives."""
        deadline = time.monotonic() + seconds
        while not self.stop_signal and time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, seconds))

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Pass signals on to the worker inside the block; SIGHUP stays ignored if it is ignored."""
        previous_handlers = {
            signum: signal.signal(signum, self.handle_signal)
            for signum in STOP_SIGNALS
            if signal.getsignal(signum) != signal.SIG_IGN or signum != signal.SIGHUP
        }
        try:
            yield
        finally:
            if self.worker:
                self.worker.kill()
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    def handle_signal(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on to the worker; after a second one, kill the worker if it does not exit in time."""
        now = time.monotonic()
        if self.stop_signal is None:
            self.stop_signal, self.first_signal_time = signum, now
        elif now - self.first_signal_time > SAME_SIGNAL_SECONDS:
            self.kill_time = self.kill_time or now + self.timeouts.shutdown
        if self.worker:
            self.worker.send_signal(signum)
