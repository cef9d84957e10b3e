"""The parent of a process that computes: starts it, watches it, and ends with the parents of all others."""

import contextlib
import dataclasses
import errno
import functools
import hmac
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from sinklab.processes.child import WorkerProcess
from sinklab.processes.cluster import ProcessInfo
from sinklab.processes.ending import STOPPING_MESSAGE, SAME_SIGNAL_SECONDS, ExitStatus, make_immediate_stop, make_early_stop
from sinklab.processes.hub import Coordinator, RestartDecider
from sinklab.processes.patience import Timeouts
from sinklab.processes.secret import SECRET_VARIABLE, RunSecret, create_secret, find_secret, read_secret_variable
from sinklab.processes.wire import (
    FROM_COORDINATOR_DECODER,
    NOT_A_RUN_PROCESS,
    ProgressReport,
    Heartbeat,
    Challenge,
    WorkerExit,
    GatherRequest,
    GatherResult,
    StartWorkers,
    Hello,
    RetryLater,
    Message,
    RunExit,
    Rejection,
    Welcome,
    MessageChannel,
    get_host_name,
)
from sinklab.record import UserError

CONNECT_RETRY_SECONDS = 0.2  # seconds between two attempts to reach process 0


class Supervisor:
    """All it does happens in one thread; the others, and signals, put into `events` what it is to do.

    `failed` is told of an end, and of the noise that came before it; `judge`, of process 0, says whether all begin
    again.
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
        self.process_info, self.command, self.timeouts, self.on_failure, self.print_line = process_info, command, timeouts, on_failure, print_line
        self.coordinator = Coordinator(process_info.count, timeouts, decide_restart, print_line) if process_info.index == 0 else None
        self.events = queue.SimpleQueue()
        self.channel = self.worker = self.exit_status = self.stop_request = None
        self.generation, self.last_heartbeat, self.is_accepted = 0, 0.0, False
        self.deadline = time.monotonic() + timeouts.join
        self.secret, self.nonces = RunSecret(), ('', '')

    def run(self) -> ExitStatus:
        """Until all processes have ended; how they have."""
        stop_signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        signals = [
            signum for signum in stop_signals if signal.getsignal(signum) != signal.SIG_IGN or signum != signal.SIGHUP
        ]
        previous_handlers = {
            signum: signal.signal(signum, lambda signum, _: self.post_event(self.handle_signal, signum)) for signum in signals
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
        """Does the next thing that is to do."""
        with contextlib.suppress(queue.Empty):
            self.events.get(timeout=min(timeout, self.timeouts.heartbeat / 2))()
        if time.monotonic() - self.last_heartbeat > self.timeouts.heartbeat and self.events.empty():
            self.send_heartbeat()
        if self.channel and not self.is_accepted and not self.coordinator and time.monotonic() > self.deadline + self.timeouts.silence:
            self.exit_status = self.exit_status or ExitStatus('refused', self.wrong_address_message)  # who says something, and never enough

    @property
    def wrong_address_message(self) -> str:
        return f'what answers at {self.process_info.address} is not process 0 of a run; give its address'

    def start(self) -> None:
        """Goes to where the supervisors of all processes meet."""
        read_secret_variable()
        if self.coordinator:
            if self.process_info.count > 1 and not self.open_coordinator():
                return
            if self.process_info.count > 1:  # before anybody is answered, who may then look for it
                self.coordinator.secret = self.secret = create_secret(self.process_info)
                self.warn_without_secret()
            sock, coordinator_sock = socket.socketpair()
            self.coordinator.attach_local(coordinator_sock)
            self.coordinator.thread.start()
            self.start_channel(sock)
        else:
            self.connect()

    def open_coordinator(self) -> bool:
        """Waits for a run that is at its end to let go of the port, unless a signal comes first."""
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
                f'{SECRET_VARIABLE} is not set, and whoever reaches {self.process_info.address} can end this run; set it to the '
                'same random text for all processes'
            )

    def start_channel(self, sock: socket.socket) -> None:
        self.channel = MessageChannel(sock, self.timeouts.silence, FROM_COORDINATOR_DECODER)
        threading.Thread(target=self.receive_messages, args=(self.channel,), daemon=True).start()

    def answer_challenge(self, challenge: Challenge) -> None:
        """Say who this is, and prove that it knows the secret."""
        if not self.coordinator:
            self.secret = find_secret(self.process_info)
        self.nonces = challenge.nonce, secrets.token_hex(32)
        index, count = self.process_info.index, self.process_info.count
        proof = self.secret.prove('process', *self.nonces, index, count)
        self.channel.send(Hello(index, count, get_host_name(), os.getpid(), self.nonces[1], proof))

    def check_welcome(self, welcome: Welcome) -> None:
        """Go on, if it is the hub that welcomes."""
        expected = self.secret.prove('hub', *self.nonces, self.process_info.index, self.process_info.count)
        if hmac.compare_digest(welcome.proof, expected) and self.nonces[0]:
            self.is_accepted = True
        else:
            self.channel.reject()

    def connect(self) -> None:
        """Goes to process 0, unless a signal comes first."""
        while not self.exit_status:
            try:
                sock = socket.create_connection((self.process_info.host, self.process_info.port), self.timeouts.silence)
                if sock.getsockname() != sock.getpeername():  # a port of its own that met itself
                    self.start_channel(sock)
                    return
                sock.close()
            except OSError as error:
                if time.monotonic() > self.deadline:
                    raise UserError(
                        f'nobody answers at {self.process_info.address} for {self.timeouts.join:.0f} s ({error}); start '
                        'process 0 on that host, or give its address in --coordinator'
                    ) from error
            self.process_event(CONNECT_RETRY_SECONDS)

    def reconnect(self, message: str) -> None:
        """Comes again: a run that is at its end will have made room."""
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
        """What the hub says."""
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
        """The hub is gone, or something else is where it should be."""
        if channel is not self.channel:
            return
        if self.coordinator and self.coordinator.failure:
            self.exit_status = self.exit_status or self.coordinator.failure
            return
        lost_status = ExitStatus('lost', f'the supervisor of process 0 ({self.process_info.address}) is {channel.end_reason}')
        if self.is_accepted or channel.end_reason == NOT_A_RUN_PROCESS:
            self.exit_status = self.exit_status or (lost_status if self.is_accepted else ExitStatus('refused', self.wrong_address_message))
        else:  # as a run at its end leaves who comes late
            self.reconnect(self.wrong_address_message)

    def start_worker(self, generation: int, port: int | None, previous_exit: ExitStatus | None) -> None:
        """Starts the child, in the place of one that has ended or is to."""
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
            self.worker = WorkerProcess(self.command, self.process_info, jax_coordinator, bind_address, self.timeouts, on_message)

    def handle_worker_message(self, worker: WorkerProcess, message: Message | None) -> None:
        """What the child says, and at last that it has let go of the line."""
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
        """Lets all know of an end; the hub alone decides what comes of it."""
        if self.channel:
            self.forward(WorkerExit(exit_status))
        else:
            self.exit_status = exit_status

    def handle_signal(self, signum: int) -> None:
        """The first signal is the child's, once it has an ear for it; a later one acts at once."""
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
            if self.process_info.index:  # a child that has the terminal says so itself
                self.print_line(STOPPING_MESSAGE)

    def stop_worker(self, exit_status: ExitStatus) -> None:
        """Ends the child, and keeps what it leaves behind where something is to be looked into."""
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
