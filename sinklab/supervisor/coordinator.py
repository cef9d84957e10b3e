"""The coordinator in process 0: it registers workers, detects hangs, and decides how a run ends.

Processes authenticate their connections by the secret of the run, which is never sent. Each side of a new connection
sends a nonce, and proves by an HMAC over both nonces that it knows the secret. If there is no secret, the proofs are
still checked, but they protect nothing.
"""

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import math
import os
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from sinklab.errors import UserError
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.supervisor.cluster import ProcessInfo, is_loopback
from sinklab.supervisor.exit_status import ExitStatus, combine_exit_statuses, describe_error
from sinklab.supervisor.messages import (
    DECODE_ERRORS,
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    NOT_A_RUN_PROCESS,
    TO_COORDINATOR_DECODER,
    Challenge,
    GatherRequest,
    GatherResult,
    Heartbeat,
    Hello,
    Message,
    ProgressReport,
    Rejection,
    RetryLater,
    RunExit,
    StartWorkers,
    Timeouts,
    Welcome,
    WorkerExit,
    encode_message,
)

SECRET_VARIABLE = 'SINKLAB_RUN_SECRET'
MIN_SECRET_CHARS = 16  # whoever records a greeting can try all shorter secrets
MAX_SECRET_FILE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class RunSecret:
    """A secret, and its file if process 0 has created one."""

    text: str = ''
    file: Path | None = None

    def prove(self, role: str, *parts: object) -> str:
        """Return an HMAC that proves knowledge of the secret.

        Args:
            role: The side that makes the proof, so that nobody can send a proof back to its sender.
            *parts: The nonces of both sides, and the values that the proof authenticates.
        """
        content = '\n'.join([role, *map(str, parts)])
        return hmac.new(self.text.encode(), content.encode(), 'sha256').hexdigest()

    def remove_file(self) -> None:
        """Remove the file of the secret.

        Call this while the port is still held: afterwards the file may be that of another run.
        """
        if self.file:
            with contextlib.suppress(OSError):
                self.file.unlink()


def read_secret_variable() -> str:
    """Return the value of SINKLAB_RUN_SECRET; '' if the variable is not set.

    Raises:
        UserError: The value is empty, or too short to protect anything.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is None:
        return ''
    secret = secret.strip()
    if not secret:  # the command that should have set it failed; the run must not go on unprotected
        raise UserError(
            f'{SECRET_VARIABLE} is set and empty, and needs at least {MIN_SECRET_CHARS} characters; '
            'make one for all processes with: openssl rand -hex 32, or unset it'
        )
    if len(secret) < MIN_SECRET_CHARS:
        raise UserError(
            f'{SECRET_VARIABLE} has {len(secret)} characters and needs at least {MIN_SECRET_CHARS}; '
            'make one with: openssl rand -hex 32'
        )
    return secret


def create_secret(process_info: ProcessInfo) -> RunSecret:
    """Return the secret of process 0: SINKLAB_RUN_SECRET, or a new one if all processes are local.

    A new secret is written to the user's cache, readable by this user alone. If it cannot be written, the secret is
    the one that the other processes find there: that of a run that was killed, or ''. The secret is also '' if
    processes are on several machines and the variable is not set.
    """
    if (secret := read_secret_variable()) or not process_info.is_local:
        return RunSecret(secret)
    text, file = secrets.token_hex(32), get_secret_path(process_info.port)
    temporary_path = file.with_name(f'{file.name}.{secrets.token_hex(4)}')
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, 'w') as stream:
            stream.write(text)
        temporary_path.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        return RunSecret(read_secret_file(file), file)
    return RunSecret(text, file)


def find_secret(process_info: ProcessInfo) -> RunSecret:
    """Return the secret of another process than 0: SINKLAB_RUN_SECRET, or the one in process 0's file.

    Call this after process 0 has answered: by then it has written the file.
    """
    if (secret := read_secret_variable()) or not process_info.is_local:
        return RunSecret(secret)
    return RunSecret(read_secret_file(get_secret_path(process_info.port)))


def read_secret_file(file: Path) -> str:
    """Return the secret in a file of this user; '' if there is none, or if it is too short."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as stream:
            text = stream.read(MAX_SECRET_FILE_BYTES) if os.fstat(stream.fileno()).st_uid == os.geteuid() else ''
    except (OSError, ValueError):
        return ''
    return text if len(text) >= MIN_SECRET_CHARS else ''


def get_secret_path(port: int) -> Path:
    """Return the file of the secret of the run whose process 0 listens on a port of this machine."""
    host = re.sub(r'[^\w.-]', '_', socket.gethostname())
    return get_cache_dir() / 'run-secrets' / f'{host}-{port}'


MAX_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES  # limit of the write buffer; an empty buffer accepts any message
MAX_UNREAD_GREETING_BYTES = 4 * MAX_GREETING_BYTES
NOT_LOCAL_ERRNOS = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT  # no interface of this machine has the address


class Connection(asyncio.Protocol):
    """A connection of the coordinator, with timeouts and a bounded write buffer.

    `end_reason` says why the connection has ended, and is empty while it is open.

    Args:
        silence_seconds: Seconds without a message, or with unread data, after which the connection is aborted.
        on_open: Called with the connection when it is open.
        on_message: Called with the connection and each message.
        on_lost: Called with the connection when it has ended.
    """

    def __init__(self, silence_seconds: float, on_open: Callable, on_message: Callable, on_lost: Callable):
        self.silence_seconds, self.on_open, self.on_message, self.on_lost = (
            silence_seconds,
            on_open,
            on_message,
            on_lost,
        )
        self.end_reason, self.is_authenticated = '', False
        self.nonce = secrets.token_hex(32)
        self.transport, self.partial_line = None, bytearray()
        self.start_time = self.last_heard_time = time.monotonic()
        self.blocked_since = None  # since when sent data has waited for the other end; None: no data waits

    @property
    def max_message_bytes(self) -> int:
        return MAX_MESSAGE_BYTES if self.is_authenticated else MAX_GREETING_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # so that the first byte that waits calls `pause_writing`
        self.on_open(self)

    def send_challenge(self) -> None:
        self.send(Challenge(self.nonce))

    def pause_writing(self) -> None:
        self.blocked_since = time.monotonic()

    def resume_writing(self) -> None:
        self.blocked_since = None

    def data_received(self, data: bytes) -> None:
        line_end, *next_parts = data.split(b'\n')
        self.partial_line += line_end
        for next_part in next_parts:
            line, self.partial_line = self.partial_line, bytearray(next_part)
            if self.end_reason or not self.receive_line(line):
                return
        if len(self.partial_line) > self.max_message_bytes:
            self.abort(NOT_A_RUN_PROCESS)

    def receive_line(self, line: bytearray) -> bool:
        """Decode a line and pass the message to `on_message`; abort this connection if it is invalid.

        `on_message` handles its own errors, since they are not the fault of the sender.

        Returns:
            Whether the connection is still open.
        """
        try:
            if len(line) > self.max_message_bytes:
                raise ValueError(f'{len(line)} bytes')
            message = TO_COORDINATOR_DECODER.decode(line)
        except DECODE_ERRORS:
            self.abort(NOT_A_RUN_PROCESS)
            return False
        if self.is_authenticated:  # before that, one timeout covers the whole greeting
            self.last_heard_time = time.monotonic()
        self.on_message(self, message)
        return not self.end_reason

    def connection_lost(self, error: Exception | None) -> None:
        self.end_reason = self.end_reason or 'gone'
        self.on_lost(self)

    def send(self, message: Message) -> None:
        """Send a message; abort the connection if too much data waits for the other end to read."""
        if self.end_reason:
            return
        line, unread_bytes = encode_message(message), self.transport.get_write_buffer_size()
        if unread_bytes and unread_bytes + len(line) > (
            MAX_UNREAD_BYTES if self.is_authenticated else MAX_UNREAD_GREETING_BYTES
        ):
            self.abort('not reading messages')
        else:
            self.transport.write(line)

    def check_timeouts(self, now: float) -> None:
        """Abort the connection if it has been silent, or has left data unread, for too long."""
        if self.blocked_since is not None and now - self.blocked_since > self.silence_seconds:
            self.abort(f'not reading messages for {self.silence_seconds:.0f} s')
        elif now - self.last_heard_time > self.silence_seconds:
            self.abort(f'without a heartbeat for {self.silence_seconds:.0f} s')

    def close(self) -> None:
        """Close the connection after its buffered data, as far as the other end reads it at once."""
        self.end_reason = self.end_reason or 'gone'
        self.transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection at once, without its buffered data.

        The event loop calls `on_lost` afterwards.
        """
        self.end_reason = self.end_reason or reason
        self.partial_line = bytearray()
        self.transport.abort()


def open_listeners(host: str, port: int, backlog: int) -> tuple[list[socket.socket], str]:
    """Listen on the interface with the host's address, or on all interfaces if none is known to have it.

    Args:
        host: The host name or address of process 0, as it is given to the other processes.
        port: The port to listen on.
        backlog: The maximum number of connections that the system queues until they are accepted.

    Returns:
        The sockets, and the reason for listening on all interfaces; '' if only the host's address is used.

    Raises:
        UserError: The port is in use, or this user may not open it. The cause is the OSError.
    """
    try:
        addresses = dict.fromkeys(
            (family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        return listen_on_all_interfaces(port, backlog), f'{host} has no address on this machine ({error.strerror})'
    if not is_loopback(host) and all(is_loopback(address[0]) for _, address in addresses):
        return listen_on_all_interfaces(port, backlog), f'{host} is {next(iter(addresses))[1][0]} on this machine'
    listeners, reason = [], ''
    for family, address in addresses:
        try:
            listeners.append(open_listener(family, address, backlog))
        except OSError as error:
            if error.errno not in NOT_LOCAL_ERRNOS:
                for listener in listeners:
                    listener.close()
                raise_port_error(port, error)
            reason = f'{address[0]}: {os.strerror(error.errno)}'
    return (listeners, '') if listeners else (listen_on_all_interfaces(port, backlog), reason)


def open_listener(family: int, address: tuple, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_on_all_interfaces(port: int, backlog: int) -> list[socket.socket]:
    """Listen on all interfaces, for IPv4 and IPv6 if the system supports both in one socket."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return [
            socket.create_server(('', port), family=family, backlog=backlog, dualstack_ipv6=family == socket.AF_INET6)
        ]
    except OSError as error:
        raise_port_error(port, error)


def raise_port_error(port: int, error: OSError) -> NoReturn:
    raise UserError(
        f'port {port} cannot be opened for the other processes ({os.strerror(error.errno)}); give another '
        'port in --coordinator to all of them, or stop the program that uses it'
    ) from error


# Activities without a usual duration. Their timeout is Timeouts.untimed.
UNTIMED_ACTIVITIES = ('starting', 'compiling', 'measuring', 'saving', 'restoring', 'ending')
UNBOUNDED_ACTIVITIES = ('preparing its data',)  # no timeout, since data can have any size
ACTIVITY_FORMATS = {'step': 'in step {step}', 'reading its batch': 'reading its batch of step {step}'}


@dataclasses.dataclass
class Progress:
    """The progress of a process: its activity, step, start time, and the usual duration of that activity."""

    activity: str = 'starting'
    step: int = 0
    usual_seconds: float | None = None
    start_time: float = dataclasses.field(default_factory=time.monotonic)

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

    def __str__(self) -> str:
        text = ACTIVITY_FORMATS.get(
            self.activity, f'{self.activity} at step {{step}}' if self.step else self.activity
        )
        return text.format(step=self.step)


@dataclasses.dataclass
class WorkerState:
    index: int
    host: str
    pid: int
    conn: Connection
    worker_pid: int | None = None
    progress: Progress = dataclasses.field(default_factory=Progress)
    excused_time: float = 0.0  # when it last waited for a process in an untimed activity

    def __str__(self) -> str:
        return f'process {self.index} (host {self.host}, pid {self.worker_pid or self.pid})'

    def update_progress(self, report: ProgressReport) -> None:
        self.worker_pid, self.progress = (
            report.child,
            Progress(report.place, report.step, report.usual, time.monotonic() - report.seconds),
        )

    def is_late(self, timeouts: Timeouts) -> bool:
        return time.monotonic() - max(self.progress.start_time, self.excused_time) > self.progress.get_timeout(
            timeouts
        )

    def reset(self) -> None:
        self.worker_pid, self.progress = None, Progress()


def find_hung_worker(unfinished: list[WorkerState], timeouts: Timeouts) -> ExitStatus | None:
    """Return the exit status `hung` if a worker exceeds its timeout; None otherwise.

    Workers that wait for stragglers are excused as long as each straggler is in an untimed activity, such as saving,
    and within its timeout.
    """
    furthest = max((worker.progress for worker in unfinished), key=lambda progress: progress.rank, default=Progress())
    stragglers = [worker for worker in unfinished if worker.progress.rank < furthest.rank]
    if stragglers and all(
        worker.progress.activity in UNTIMED_ACTIVITIES and not worker.is_late(timeouts) for worker in stragglers
    ):
        for worker in unfinished:
            worker.excused_time = worker.excused_time if worker in stragglers else time.monotonic()
    if not any(worker.is_late(timeouts) for worker in unfinished):
        return None
    usual_text = '' if furthest.usual_seconds is None else f', usual {furthest.usual_seconds:.2g} s'
    details = [
        f'{worker} did not arrive ({worker.progress} for {worker.progress.seconds:.0f} s)' for worker in stragglers
    ]
    reason = '; '.join(details) or ('all have arrived' if len(unfinished) > 1 else 'it hangs')
    return ExitStatus('hung', f'{furthest} for {furthest.seconds:.0f} s{usual_text}: {reason}')


RestartDecider = Callable[
    [ExitStatus, bool], tuple[ExitStatus, bool]
]  # (exit status, whether a restart is possible) -> (exit status to report, whether to restart)


USER_PORTS, PORT_OFFSET = range(1024, 65536), 1000
RUN_ENDING_MESSAGE = 'the run at this address is ending; start all of its processes again'
WRONG_SECRET_MESSAGE = (
    f'process 0 and this process have different secrets of the run, or one has none; '
    f'give the same {SECRET_VARIABLE} to all processes, or, if all are on one machine, '
    'start them as one user with one SINKLAB_CACHE'
)
MAX_UNAUTHENTICATED = 64  # connections without a greeting, in addition to one for each process
GREETING_SECONDS = 0.2  # seconds that each of these has at least for its greeting
ACCEPT_RETRY_SECONDS = 0.2  # seconds until a failed accept is retried
LISTEN_BACKLOG = 1024  # connections that the system queues until they are accepted


class Coordinator:
    """The coordinator of a run. It works in a thread of its own.

    It gathers values of the workers, detects hangs, and decides how the run ends.

    Args:
        count: The number of processes.
        timeouts: The timeouts of the processes.
        decide_restart: Decides whether all processes restart after an end.
        print_line: Prints a line for the user.
    """

    def __init__(
        self,
        count: int,
        timeouts: Timeouts,
        decide_restart: RestartDecider,
        print_line: Callable[[str], None] = lambda text: None,
    ):
        self.count, self.timeouts, self.decide_restart, self.print_line = count, timeouts, decide_restart, print_line
        self.secret = RunSecret()
        self.workers: dict[int, WorkerState] = {}
        self.rejections: dict[int, str] = {}
        self.generation, self.port, self.interface, self.servers, self.local_sock = 0, 0, None, [], None
        self.unauthenticated: dict[Connection, None] = {}  # no accepted greeting yet; oldest first
        self.accepting: set[asyncio.Task] = set()
        self.deadline = time.monotonic() + timeouts.join
        self.is_over, self.exit_statuses = False, {}
        self.failure: ExitStatus | None = (
            None  # an error of the coordinator itself, for when no message can report it
        )
        self.gather_requests: dict[int, dict[int, GatherRequest]] = {}
        self.thread = threading.Thread(target=self.run_thread, daemon=True)

    def open(self, host: str, port: int) -> str:
        """Listen for the supervisors of the other processes.

        Returns:
            The reason for listening on all interfaces; '' if only the host's address is used.
        """
        self.servers, reason = open_listeners(host, port, LISTEN_BACKLOG)
        self.port, self.deadline = port, time.monotonic() + self.timeouts.join
        self.interface = None if reason else self.servers[0].getsockname()[0]
        return reason

    def connection_limit(self) -> int:
        """Return how many connections may lack a greeting, so that most file descriptors stay free."""
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = self.count + MAX_UNAUTHENTICATED
        return (
            limit
            if max_descriptors == resource.RLIM_INFINITY
            else min(limit, max(4, (max_descriptors - self.count) // 4))
        )

    def attach_local(self, local_sock: socket.socket) -> None:
        """Attach the supervisor of process 0. Call this before the thread starts."""
        self.local_sock = local_sock

    def run_thread(self) -> None:
        """Run the coordinator in its thread until the run is over."""
        try:
            asyncio.run(self.run())
        except Exception as error:  # before a connection existed, e.g. for lack of file descriptors
            self.failure = self.failure or describe_error(error)
        finally:
            self.local_sock.close()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.handle_loop_error)
        self.wake_event = asyncio.Event()
        await loop.create_connection(lambda: self.make_connection(Connection.send_challenge), sock=self.local_sock)
        for server in self.servers:
            server.setblocking(False)
            loop.add_reader(server, self.accept_connection, server)
        last_heartbeat = 0.0
        try:
            while not self.is_over or (self.list_connected_workers() and time.monotonic() < self.deadline):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wake_event.wait(), self.timeouts.heartbeat / 2)
                self.wake_event.clear()
                now = time.monotonic()
                if now - last_heartbeat > self.timeouts.heartbeat:
                    last_heartbeat = now
                    with self.end_run_on_error():
                        self.broadcast(Heartbeat())
                        for conn in [*self.unauthenticated, *(worker.conn for worker in self.workers.values())]:
                            conn.check_timeouts(now)
                        self.check_deadlines(now)
        finally:
            self.secret.remove_file()
            for server in self.servers:
                loop.remove_reader(server)
                server.close()
            for conn in [*self.unauthenticated, *(worker.conn for worker in self.workers.values())]:
                conn.close()
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def end_run_on_error(self) -> Iterator[None]:
        """End the run for all processes, with the reason, if the coordinator itself fails."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the run for all processes because of an error of the coordinator, unless it has ended already."""
        if not self.is_over:
            self.failure = describe_error(error)
            self.end_run(self.failure)

    def handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """Handle an exception that asyncio reports.

        An OSError belongs to one connection, which is closed by then; it does not end the run.
        """
        error = context.get('exception')
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.fail(error)

    def make_connection(self, on_open: Callable) -> Connection:
        return Connection(self.timeouts.silence, on_open, self.receive, self.handle_loss)

    def accept_connection(self, server: socket.socket) -> None:
        """Accept a connection; if too many have sent no greeting, drop the oldest of them."""
        if len(self.unauthenticated) + len(self.accepting) >= self.connection_limit():
            oldest = next((conn for conn in self.unauthenticated if not conn.end_reason), None)
            wait_seconds = GREETING_SECONDS - (time.monotonic() - oldest.start_time) if oldest else GREETING_SECONDS
            if wait_seconds > 0:
                self.pause_accepting(server, wait_seconds)
            else:
                oldest.abort('one of too many connections')
            return
        try:
            sock, _ = server.accept()
        except (BlockingIOError, ConnectionError):  # the client has closed it already
            return
        except OSError:  # no file descriptors, or no memory
            self.pause_accepting(server, ACCEPT_RETRY_SECONDS)
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(
            loop.connect_accepted_socket(lambda: self.make_connection(self.challenge_connection), sock)
        )
        self.accepting.add(task)
        task.add_done_callback(self.accepting.discard)

    def pause_accepting(self, server: socket.socket, seconds: float) -> None:
        """Accept no connection for a while; the system queues those that arrive."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(server)
        loop.call_later(
            seconds, lambda: server.fileno() < 0 or loop.add_reader(server, self.accept_connection, server)
        )

    def challenge_connection(self, conn: Connection) -> None:
        self.unauthenticated[conn] = None
        conn.send_challenge()

    def list_connected_workers(self) -> list[WorkerState]:
        """Return the workers with an open connection, except that of process 0."""
        return [worker for worker in self.workers.values() if worker.index and not worker.conn.end_reason]

    def broadcast(self, message: Message) -> None:
        for worker in self.workers.values():
            worker.conn.send(message)

    def find_worker(self, conn: Connection) -> WorkerState | None:
        return next((worker for worker in self.workers.values() if worker.conn is conn), None)

    def handle_loss(self, conn: Connection) -> None:
        self.unauthenticated.pop(conn, None)
        self.wake_event.set()
        with self.end_run_on_error():
            if (worker := self.find_worker(conn)) and not self.is_over:
                worker.worker_pid = None
                self.record_exit(worker, ExitStatus('lost', conn.end_reason))

    def receive(self, conn: Connection, message: Message) -> None:
        with self.end_run_on_error():
            self.handle_message(conn, message)

    def handle_message(self, conn: Connection, message: Message) -> None:
        worker = self.find_worker(conn)
        if not worker:
            if isinstance(message, Hello):
                self.register_worker(conn, message)
        elif not self.is_over and getattr(message, 'generation', None) == self.generation:
            match message:
                case WorkerExit(end=exit_status):
                    self.record_exit(worker, exit_status)
                case ProgressReport():
                    worker.update_progress(message)
                case GatherRequest():
                    self.gather(worker, message)

    def register_worker(self, conn: Connection, hello: Hello) -> None:
        process, count = hello.process, hello.count
        newcomer, current = WorkerState(process, hello.host, hello.pid, conn), self.workers.get(process)
        proof_parts = conn.nonce, hello.nonce, process, count
        is_ending = self.is_over or any(worker.conn.end_reason for worker in self.workers.values())
        problem, reply_class = None, Rejection
        if not hmac.compare_digest(hello.proof, self.secret.prove('process', *proof_parts)):
            # The sender belongs to the next start, which may have another secret, or to no run.
            conn.send(RetryLater(RUN_ENDING_MESSAGE) if is_ending else Rejection(WRONG_SECRET_MESSAGE))
            if not is_ending:
                self.reject_without_secret(process)
            return
        if count != self.count:
            problem = (
                f'{newcomer} has --processes={count}, but process 0 has {self.count}; give the same number to all'
            )
        elif process not in range(self.count):
            problem = f'--process={process} is not below --processes={self.count}'
        elif self.is_over or (current and current.conn.end_reason):  # the process belongs to the next run
            problem, reply_class = RUN_ENDING_MESSAGE, RetryLater
        elif current:
            problem = f'--process={process} is used by {current}; give each process its own number'
        if problem:
            if process in range(self.count):
                self.rejections[process] = problem
            conn.send(reply_class(problem))  # the other end closes: a reset could overtake this message
            return
        self.unauthenticated.pop(conn, None)
        self.workers[process] = newcomer
        conn.is_authenticated, conn.last_heard_time = True, time.monotonic()
        conn.send(Welcome(self.secret.prove('hub', *proof_parts)))
        if len(self.workers) == self.count:
            self.start_generation()

    def reject_without_secret(self, process: int) -> None:
        """Print, once for each missing process, that a process with its index had another secret.

        Process 0 keeps waiting: a connection that has not proved the secret must not end the run.
        """
        if process in range(self.count) and process not in (*self.workers, *self.rejections):
            self.rejections[process] = (
                f'a connection as process {process} had another secret: {SECRET_VARIABLE} differs'
            )
            self.print_line(f'rejected: {self.rejections[process]}; process 0 still waits for process {process}')

    def start_generation(self, previous_exit: ExitStatus | None = None) -> None:
        """Tell all supervisors to start their workers, for the first time or again."""
        self.generation += 1
        self.deadline, self.exit_statuses, self.gather_requests = None, {}, {}
        for worker in self.workers.values():
            worker.reset()
        port = find_free_port(self.port) if self.count > 1 else None
        self.broadcast(StartWorkers(self.generation, port, previous_exit))

    def gather(self, worker: WorkerState, message: GatherRequest) -> None:
        """Send the values of the n-th gather to all workers, once each has sent its own.

        If workers send different names for the same gather, the later one counts as crashed.
        """
        requests = self.gather_requests.setdefault(message.number, {})
        requests[worker.index] = message
        others = ((index, mismatch.name) for index, mismatch in requests.items() if mismatch.name != message.name)
        if mismatch := next(others, None):
            index, name = mismatch
            self.record_exit(
                worker, ExitStatus('crashed', f'reached {message.name!r} when process {index} reached {name!r}')
            )
        elif len(requests) == self.count:
            del self.gather_requests[message.number]
            self.broadcast(GatherResult([requests[index].value for index in range(self.count)], self.generation))

    def record_exit(self, worker: WorkerState, exit_status: ExitStatus) -> None:
        """Record the exit status of a worker.

        After the first failure the coordinator waits a moment for other exit statuses: one of them may be the cause.
        """
        self.exit_statuses.setdefault(worker.index, exit_status)
        if exit_status.cause != 'done':
            wait_seconds = self.timeouts.orderly_exit if exit_status.orderly else self.timeouts.settle
            now = time.monotonic()
            self.deadline = min(self.deadline or math.inf, now + wait_seconds) if self.generation else now
        self.check_deadlines(time.monotonic())

    def check_deadlines(self, now: float) -> None:
        """End or restart the run if a deadline has passed or a worker has ended or hangs."""
        unfinished = [worker for worker in self.workers.values() if worker.index not in self.exit_statuses]
        is_past_deadline = self.deadline is not None and now >= self.deadline
        if self.is_over:
            return
        if self.exit_statuses and (is_past_deadline or len(self.exit_statuses) == self.count):
            self.end_or_restart(
                combine_exit_statuses(
                    self.exit_statuses, [str(self.workers.get(index)) for index in range(self.count)]
                )
            )
        elif is_past_deadline:
            self.end_or_restart(ExitStatus('refused', self.describe_missing()))
        elif self.deadline is None and (exit_status := find_hung_worker(unfinished, self.timeouts)):
            self.end_or_restart(exit_status)

    def describe_missing(self) -> str:
        absent = [index for index in range(self.count) if index not in self.workers]
        reasons = [self.rejections[index] for index in absent if index in self.rejections]
        return (
            f'process {", ".join(map(str, absent))} of {self.count} did not connect within {self.timeouts.join:.0f} s'
            f'{"".join(f" ({reason})" for reason in reasons)}; start all of them'
        )

    def end_or_restart(self, exit_status: ExitStatus) -> None:
        can_restart = len(self.list_connected_workers()) == self.count - 1
        exit_status, is_restarting = self.decide_restart(exit_status, can_restart)
        if is_restarting:
            self.start_generation(exit_status)
        else:
            self.end_run(exit_status)

    def end_run(self, exit_status: ExitStatus) -> None:
        """End the run and broadcast its exit status to all processes."""
        self.is_over, self.deadline = True, time.monotonic() + self.timeouts.shutdown
        self.broadcast(RunExit(exit_status))
        self.wake_event.set()


def find_free_port(base_port: int) -> int:
    """Return a free port away from `base_port`, next to which other jobs of this host have theirs.

    Raises:
        UserError: No port is free.
    """
    first = base_port + PORT_OFFSET - USER_PORTS.start
    for port in (USER_PORTS[(first + offset) % len(USER_PORTS)] for offset in range(len(USER_PORTS))):
        with contextlib.suppress(OSError), socket.create_server(('', port)):
            return port
    raise UserError('no port of this machine is free')
