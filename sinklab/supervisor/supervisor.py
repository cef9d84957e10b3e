"""The supervisor of one worker process: starts it, watches it, restarts it, and records how it ended."""

import contextlib
import dataclasses
import errno
import functools
import hmac
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.atomic_write import append_text, writable_folder
from sinklab.storage.lease import is_unowned
from sinklab.storage.paths import short_timeout
from sinklab.storage.untrusted_files import DamagedFileError
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.coordinator import (
    SECRET_VARIABLE,
    Coordinator,
    RestartDecider,
    RunSecret,
    create_secret,
    find_secret,
    read_secret_variable,
)
from sinklab.supervisor.coordinator import SECRET_VARIABLE as SECRET
from sinklab.supervisor.exit_status import (
    SAME_SIGNAL_SECONDS,
    STOPPING_MESSAGE,
    ExitStatus,
    make_early_stop,
    make_exit_status,
    make_immediate_stop,
)
from sinklab.supervisor.messages import (
    FROM_COORDINATOR_DECODER,
    NOT_A_RUN_PROCESS,
    WORKER_DECODER,
    Challenge,
    GatherRequest,
    GatherResult,
    Heartbeat,
    Hello,
    Message,
    MessageChannel,
    ProgressReport,
    Rejection,
    RetryLater,
    RunExit,
    StartWorkers,
    Timeouts,
    Welcome,
    WorkerExit,
    get_host_name,
)
from sinklab.supervisor.worker_client import WORKER_VARIABLE

LOG_TAIL_BYTES = 100_000  # bytes of the end of a worker's log that are kept
RUNNING_STATES = 'RSD'  # letters of /proc: running, sleeping, waiting for a disk; not stopped
STACK_DUMP_SECONDS = 0.5  # seconds that a worker has to write the stacks of its threads


class WorkerProcess:
    """A worker process, which trains.

    In process 0 its lines for the user go to the terminal. All other output goes to `log_file`.
    """

    def __init__(
        self,
        command: list[str],
        process_info: ProcessInfo,
        jax_coordinator: str | None,
        bind_address: str | None,
        timeouts: Timeouts,
        on_message: Callable[['WorkerProcess', Message | None], None],
    ):
        own_sock, worker_sock = socket.socketpair()
        self.log_file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker
        terminal = [] if process_info.index else [os.dup(1), os.dup(2)]
        settings = dict(
            link=worker_sock.fileno(),
            terminal=terminal,
            index=process_info.index,
            count=process_info.count,
            coordinator=jax_coordinator,
            bind=bind_address,
            devices=process_info.devices,
            beat=timeouts.heartbeat,
            silence=2 * timeouts.silence,
            join=timeouts.join,
        )
        self.process = subprocess.Popen(
            command,
            env={**{k: v for k, v in os.environ.items() if k != SECRET}, WORKER_VARIABLE: json.dumps(settings)},
            pass_fds=[worker_sock.fileno(), *terminal],
            stdin=subprocess.DEVNULL,
            stdout=self.log_file,
            stderr=self.log_file,
            process_group=0,  # the supervisor forwards Ctrl-C of the terminal
        )
        for descriptor in (worker_sock.detach(), *terminal):
            os.close(descriptor)
        self.channel, self.reported_exit = MessageChannel(own_sock, None, WORKER_DECODER), None
        self.has_reported = self.has_signal_handler = self.has_started = False
        self.last_report_time = time.monotonic()
        threading.Thread(target=self.receive_messages, args=(on_message,), daemon=True).start()

    def receive_messages(self, on_message: Callable) -> None:
        for message in self.channel:
            on_message(self, message)
        on_message(self, None)

    def record_report(self, has_signal_handler: bool) -> None:
        """Record that the worker sent a report, and whether it handles signals."""
        self.last_report_time, self.has_reported, self.has_signal_handler = time.monotonic(), True, has_signal_handler
        self.has_started = self.has_started or has_signal_handler

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def check_silence(self, timeouts: Timeouts) -> ExitStatus | None:
        """Return the exit status `frozen` if the worker has been silent for too long; None otherwise.

        The limit is `timeouts.silence` if the system does not show the worker as running, `timeouts.join` before its
        first report, and `timeouts.busy_silence` after it: a call into C++ may keep the interpreter for a while.
        """
        silent_seconds = time.monotonic() - self.last_report_time
        is_running = read_process_state(self.process.pid) in RUNNING_STATES
        max_seconds = (
            timeouts.silence if not is_running else timeouts.busy_silence if self.has_reported else timeouts.join
        )
        if silent_seconds < max_seconds:
            return None
        return ExitStatus(
            'frozen', f'without a heartbeat for {silent_seconds:.0f} s{"" if is_running else ", possibly suspended"}'
        )

    def wait_exit_status(self, timeouts: Timeouts) -> ExitStatus:
        """Wait for the end of the worker and return its exit status; kill it if it does not end in time.

        Call this once the worker has closed its end of the connection.
        """
        try:
            return_code = self.process.wait(timeouts.shutdown)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return_code = self.process.wait()
        return self.reported_exit or make_exit_status(return_code, self.has_started, self.read_log_tail())

    def kill(self, dump_stacks: bool) -> None:
        """Kill the worker; with `dump_stacks`, have it first write the stacks of its threads to its log."""
        if dump_stacks and self.has_reported and self.process.poll() is None:
            self.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STACK_DUMP_SECONDS)
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def read_log_tail(self) -> str:
        """Return the traceback that the worker reported, and the end of its log file."""
        size = os.fstat(self.log_file.fileno()).st_size
        log_tail = os.pread(self.log_file.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(
            errors='replace'
        )
        return f'{self.reported_exit.trace if self.reported_exit else ""}{log_tail}'


def read_process_state(pid: int) -> str:
    """Return the state of a process as a letter of /proc; `?` if there is no such process."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except (OSError, IndexError):
        return '?'


STORAGE_TIMEOUT_SECONDS = (
    10.0  # seconds for which requests to a bucket are retried: nothing should wait for them longer
)
MAX_FRUITLESS = 5  # attempts in a row without a new checkpoint, restarts by a scheduler included
MAX_FRUITLESS_RESTARTS = 3  # the same, counting only restarts by the supervisors


class RestartPolicy:
    """The policy of process 0: whether a run restarts, and the record of how it ended.

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
        with contextlib.suppress(OSError, ValueError), short_timeout(STORAGE_TIMEOUT_SECONDS):
            return self.find_newest_step()
        return self.newest_step

    def decide_restart(self, exit_status: ExitStatus, can_restart: bool) -> tuple[ExitStatus, bool]:
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
                f'{exit_status.words}; that was attempt {max(self.num_fruitless, self.num_fruitless_here)} '
                'in a row without a new checkpoint',
            ), False
        is_restarting = can_restart and self.restarts > 0
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
        with contextlib.suppress(OSError, ValueError), short_timeout(STORAGE_TIMEOUT_SECONDS):
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
                    message=exit_status.words,
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
    with contextlib.suppress(OSError, UserError), short_timeout(STORAGE_TIMEOUT_SECONDS):
        if not run_dir.has_run():
            return
        with writable_folder(run_dir.path / 'processes'):
            append_text(
                run_dir.path / 'processes' / f'{index}.log',
                f'{time.strftime("%Y-%m-%dT%H:%M:%S%z")} {exit_status.words}\n{log_tail}\n',
            )


CONNECT_RETRY_SECONDS = 0.2  # seconds between two attempts to reach process 0


class Supervisor:
    """The supervisor of a worker process.

    It acts in one thread. Other threads and signal handlers put events into `events`.

    Args:
        process_info: The index and count of this process.
        command: The command line of the worker.
        timeouts: The timeouts of the processes.
        on_failure: Called with the exit status of a worker that failed and the end of its log.
        print_line: Prints a line for the user.
        decide_restart: Decides whether all processes restart; used in process 0 only.
    """

    def __init__(
        self,
        process_info: ProcessInfo,
        command: list[str],
        timeouts: Timeouts,
        on_failure: Callable[[ExitStatus, str], None],
        print_line: Callable[[str], None],
        decide_restart: RestartDecider | None = None,
    ):
        self.process_info, self.command, self.timeouts, self.on_failure, self.print_line = (
            process_info,
            command,
            timeouts,
            on_failure,
            print_line,
        )
        self.coordinator = (
            Coordinator(process_info.count, timeouts, decide_restart, print_line) if process_info.index == 0 else None
        )
        self.events = queue.SimpleQueue()
        self.channel = self.worker = self.exit_status = self.stop_request = None
        self.generation, self.last_heartbeat, self.is_accepted = 0, 0.0, False
        self.deadline = time.monotonic() + timeouts.join
        self.secret, self.nonces = RunSecret(), ('', '')

    def run(self) -> ExitStatus:
        """Run until all processes have ended, and return the exit status of the run."""
        stop_signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        signals = [
            signum for signum in stop_signals if signal.getsignal(signum) != signal.SIG_IGN or signum != signal.SIGHUP
        ]
        previous_handlers = {
            signum: signal.signal(signum, lambda signum, _: self.post_event(self.handle_signal, signum))
            for signum in signals
        }
        try:
            self.start()
            while not self.exit_status:
                self.process_event()
            return self.exit_status
        finally:
            self.close()
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    def post_event(self, function: Callable, *arguments: object) -> None:
        self.events.put(functools.partial(function, *arguments))

    def process_event(self, timeout: float = 0.5) -> None:
        """Process the next event, or return after the timeout.

        A heartbeat that is due is sent, too.
        """
        with contextlib.suppress(queue.Empty):
            self.events.get(timeout=min(timeout, self.timeouts.heartbeat / 2))()
        if time.monotonic() - self.last_heartbeat > self.timeouts.heartbeat and self.events.empty():
            self.send_heartbeat()
        if (
            self.channel
            and not self.is_accepted
            and not self.coordinator
            and time.monotonic() > self.deadline + self.timeouts.silence
        ):
            # Another program answers, but never greets as a coordinator.
            self.exit_status = self.exit_status or ExitStatus('refused', self.wrong_address_message)

    @property
    def wrong_address_message(self) -> str:
        return f'the program at {self.process_info.address} is not process 0 of a run; give the address of process 0'

    def start(self) -> None:
        """Open the coordinator in process 0, and connect to it in every process."""
        read_secret_variable()
        if self.coordinator:
            if self.process_info.count > 1 and not self.open_coordinator():
                return
            if self.process_info.count > 1:  # before any process is answered, which then reads the file
                self.coordinator.secret = self.secret = create_secret(self.process_info)
                self.warn_without_secret()
            sock, coordinator_sock = socket.socketpair()
            self.coordinator.attach_local(coordinator_sock)
            self.coordinator.thread.start()
            self.start_channel(sock)
        else:
            self.connect()

    def open_coordinator(self) -> bool:
        """Open the port of the coordinator; return False if a signal arrives first.

        If a run that is ending still holds the port, retry until it releases the port.

        Raises:
            UserError: The port cannot be opened.
        """
        deadline = time.monotonic() + 2 * self.timeouts.shutdown
        while not self.exit_status:
            try:
                if reason := self.coordinator.open(self.process_info.host, self.process_info.port):
                    self.print_line(f'process 0 listens on all interfaces of this machine ({reason})')
                return True
            except UserError as error:
                if time.monotonic() > deadline or error.__cause__.errno != errno.EADDRINUSE:
                    raise
            self.process_event(CONNECT_RETRY_SECONDS)
        return False

    def warn_without_secret(self) -> None:
        if not self.secret.text:
            self.print_line(
                f'{SECRET_VARIABLE} is not set, so any client of {self.process_info.address} can end this run; '
                'set it to the same random text for all processes'
            )

    def start_channel(self, sock: socket.socket) -> None:
        self.channel = MessageChannel(sock, self.timeouts.silence, FROM_COORDINATOR_DECODER)
        threading.Thread(target=self.receive_messages, args=(self.channel,), daemon=True).start()

    def answer_challenge(self, challenge: Challenge) -> None:
        """Answer with the index of this process and a proof that it knows the secret."""
        if not self.coordinator:
            self.secret = find_secret(self.process_info)
        self.nonces = challenge.nonce, secrets.token_hex(32)
        index, count = self.process_info.index, self.process_info.count
        proof = self.secret.prove('process', *self.nonces, index, count)
        self.channel.send(Hello(index, count, get_host_name(), os.getpid(), self.nonces[1], proof))

    def check_welcome(self, welcome: Welcome) -> None:
        """Accept the coordinator if it proves that it knows the secret; otherwise close the connection."""
        expected = self.secret.prove('hub', *self.nonces, self.process_info.index, self.process_info.count)
        if hmac.compare_digest(welcome.proof, expected) and self.nonces[0]:
            self.is_accepted = True
        else:
            self.channel.reject()

    def connect(self) -> None:
        """Connect to process 0, with retries; give up if a signal arrives first.

        Raises:
            UserError: Process 0 does not answer until the deadline.
        """
        while not self.exit_status:
            try:
                sock = socket.create_connection(
                    (self.process_info.host, self.process_info.port), self.timeouts.silence
                )
                if sock.getsockname() != sock.getpeername():  # not a TCP self-connection
                    self.start_channel(sock)
                    return
                sock.close()
            except OSError as error:
                if time.monotonic() > self.deadline:
                    raise UserError(
                        f'no answer from {self.process_info.address} within {self.timeouts.join:.0f} s ({error}); '
                        'start process 0 on that host, or give its address in --coordinator'
                    ) from error
            self.process_event(CONNECT_RETRY_SECONDS)

    def reconnect(self, message: str) -> None:
        """Connect again: the earlier run at this address is about to end.

        After the deadline, end with `message` instead.
        """
        self.channel.close()
        self.channel = None
        if time.monotonic() > self.deadline:
            self.exit_status = ExitStatus('refused', message)
        else:
            threading.Timer(CONNECT_RETRY_SECONDS, self.post_event, (self.connect,)).start()

    def receive_messages(self, channel: MessageChannel) -> None:
        for message in channel:
            self.post_event(self.handle_coordinator_message, channel, message)
        self.post_event(self.handle_coordinator_loss, channel)

    def send_heartbeat(self) -> None:
        self.last_heartbeat = time.monotonic()
        if self.channel:
            self.channel.send(Heartbeat())
        if self.worker:
            self.worker.channel.send(Heartbeat())
            if silence_exit := self.worker.check_silence(self.timeouts):
                self.report_exit(silence_exit)

    def handle_coordinator_message(self, channel: MessageChannel, message: Message) -> None:
        """Handle a message of the coordinator; ignore messages of earlier connections."""
        if channel is not self.channel:
            return
        match message:
            case Challenge() if not self.is_accepted:
                self.answer_challenge(message)
            case Welcome() if not self.is_accepted:
                self.check_welcome(message)
            case RetryLater(words=reason) if not self.is_accepted:
                self.reconnect(reason)
            case Rejection(words=reason) if not self.is_accepted:
                self.exit_status = self.exit_status or ExitStatus('refused', reason)
            case Heartbeat():
                pass
            case _ if not self.is_accepted:
                channel.reject()
            case RunExit(end=exit_status):
                self.exit_status = self.exit_status or exit_status
            case StartWorkers(generation=generation, port=port, after=previous_exit):
                self.start_worker(generation, port, previous_exit)
            case GatherResult(generation=self.generation) if self.worker:
                self.worker.channel.send(message)

    def handle_coordinator_loss(self, channel: MessageChannel) -> None:
        """Handle the loss of the coordinator, or an answer by another program."""
        if channel is not self.channel:
            return
        if self.coordinator and self.coordinator.failure:
            self.exit_status = self.exit_status or self.coordinator.failure
            return
        lost_status = ExitStatus(
            'lost', f'the supervisor of process 0 ({self.process_info.address}) is {channel.end_reason}'
        )
        if self.is_accepted or channel.end_reason == NOT_A_RUN_PROCESS:
            self.exit_status = self.exit_status or (
                lost_status if self.is_accepted else ExitStatus('refused', self.wrong_address_message)
            )
        else:  # a run that is ending closes the connections of late processes
            self.reconnect(self.wrong_address_message)

    def start_worker(self, generation: int, port: int | None, previous_exit: ExitStatus | None) -> None:
        """Start the worker, after stopping an earlier one that still runs."""
        if previous_exit:
            self.print_line(f'{previous_exit.words}; starting again')
            self.stop_worker(previous_exit)
        self.generation = generation
        if self.stop_request:
            self.report_exit(make_early_stop(self.stop_request[0]))
        else:
            jax_coordinator = port and self.process_info.format_address(port)
            interface = port and self.coordinator and self.coordinator.interface
            bind_address = interface and dataclasses.replace(self.process_info, host=interface).format_address(port)
            on_message = functools.partial(self.post_event, self.handle_worker_message)
            self.worker = WorkerProcess(
                self.command, self.process_info, jax_coordinator, bind_address, self.timeouts, on_message
            )

    def handle_worker_message(self, worker: WorkerProcess, message: Message | None) -> None:
        """Handle a message of the worker, or None once it has closed the connection."""
        if worker is not self.worker:
            return
        match message:
            case None:
                self.report_exit(worker.wait_exit_status(self.timeouts))
            case ProgressReport(listens=has_signal_handler):
                worker.record_report(has_signal_handler)
                self.forward(msgspec.structs.replace(message, child=worker.process.pid))
            case GatherRequest():
                self.forward(message)
            case WorkerExit(end=exit_status):
                worker.reported_exit = exit_status

    def forward(self, message: ProgressReport | GatherRequest | WorkerExit) -> None:
        self.channel.send(msgspec.structs.replace(message, generation=self.generation))

    def report_exit(self, exit_status: ExitStatus) -> None:
        """Report the exit status of the worker to the coordinator, which alone decides what follows."""
        if self.channel:
            self.forward(WorkerExit(exit_status))
        else:
            self.exit_status = exit_status

    def handle_signal(self, signum: int) -> None:
        """Forward the first signal to a worker that handles signals; end the run at once on a later one.

        Signals within SAME_SIGNAL_SECONDS of the first count as one.
        """
        now = time.monotonic()
        if self.stop_request and now - self.stop_request[1] > SAME_SIGNAL_SECONDS:
            self.report_exit(make_immediate_stop(signum))
        if self.stop_request:
            return
        self.stop_request = signum, now
        if not (self.worker and self.worker.has_started):
            self.report_exit(make_early_stop(signum))
        elif self.worker.has_signal_handler:
            self.worker.send_signal(signum)
            if self.process_info.index:  # the worker of process 0 has the terminal and prints this itself
                self.print_line(STOPPING_MESSAGE)

    def stop_worker(self, exit_status: ExitStatus) -> None:
        """Kill the worker; if it failed, pass its exit status and the end of its log to `on_failure`."""
        worker, self.worker = self.worker, None
        if worker:
            worker.kill(dump_stacks=exit_status.is_failure)
            if exit_status.is_failure:
                self.on_failure(exit_status, worker.read_log_tail())

    def close(self) -> None:
        if self.channel:
            self.channel.close()
        self.stop_worker(self.exit_status or ExitStatus('stopped'))
        if self.coordinator and self.coordinator.thread.is_alive():
            self.coordinator.thread.join(2 * self.timeouts.shutdown)
