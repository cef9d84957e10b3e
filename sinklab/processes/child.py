"""The process that computes, as the one that looks after it has it in hand."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sinklab.processes.cluster import ProcessInfo
from sinklab.processes.ending import ExitStatus, make_exit_status
from sinklab.processes.link import WORKER_VARIABLE
from sinklab.processes.patience import Timeouts
from sinklab.processes.secret import SECRET_VARIABLE as SECRET
from sinklab.processes.wire import WORKER_DECODER, Message, MessageChannel

LOG_TAIL_BYTES = 100_000  # bytes of what it says beside its words
RUNNING_STATES = 'RSD'  # runs, waits, waits for a disk; and is not stopped
STACK_DUMP_SECONDS = 0.5  # seconds to write where all of its threads are


class WorkerProcess:
    """What it has to say to a terminal goes there, all else into `noise`: the runtime's logs, aborts, stacks."""

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
        self.log_file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child
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
            process_group=0,  # a terminal's Ctrl-C comes by way of the parent
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
        """A sign of life, and whether it has an ear for signals."""
        self.last_report_time, self.has_reported, self.has_signal_handler = time.monotonic(), True, has_signal_handler
        self.has_started = self.has_started or has_signal_handler

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def check_silence(self, timeouts: Timeouts) -> ExitStatus | None:
        """Whether it gives no sign of life. One that computes in C++ may keep the interpreter for a while."""
        silent_seconds = time.monotonic() - self.last_report_time
        is_running = read_process_state(self.process.pid) in RUNNING_STATES
        max_seconds = timeouts.silence if not is_running else timeouts.busy_silence if self.has_reported else timeouts.join
        if silent_seconds < max_seconds:
            return None
        return ExitStatus('frozen', f'not heard of for {silent_seconds:.0f} s{"" if is_running else ", as if it were stopped"}')

    def wait_exit_status(self, timeouts: Timeouts) -> ExitStatus:
        """How it has ended, once it has let go of its end of the line."""
        try:
            return_code = self.process.wait(timeouts.shutdown)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return_code = self.process.wait()
        return self.reported_exit or make_exit_status(return_code, self.has_started, self.read_log_tail())

    def kill(self, dump_stacks: bool) -> None:
        """Ends it at once; writes before where all its threads are."""
        if dump_stacks and self.has_reported and self.process.poll() is None:
            self.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STACK_DUMP_SECONDS)
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def read_log_tail(self) -> str:
        """What it has said of its own failure, and the end of its noise."""
        size = os.fstat(self.log_file.fileno()).st_size
        log_tail = os.pread(self.log_file.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(errors='replace')
        return f'{self.reported_exit.trace if self.reported_exit else ""}{log_tail}'


def read_process_state(pid: int) -> str:
    """What the system says of a process, in its letters; ? where it says nothing."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except (OSError, IndexError):
        return '?'
