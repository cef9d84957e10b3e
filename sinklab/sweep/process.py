"""Commands as processes of their own, which get at once every signal that comes here."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable

from sinklab.processes.ending import CAUSE_BY_SIGNAL

MAX_LINE_BYTES = 65536  # bytes of a line that are read at once


class SignalForwarder:
    """Collects SIGINT, SIGTERM and SIGHUP as long as it is open, and passes them on to the commands that run.

    Args:
        stopping: called once a signal has come, in a thread of its own: a handler must not write files.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None):
        self.received_signals, self.processes, self.on_stop = [], set(), on_stop
        self.signal_queue = queue.SimpleQueue()  # the one that a handler may put something into

    def __enter__(self) -> 'SignalForwarder':
        handled_signals = [
            signal_number for signal_number in CAUSE_BY_SIGNAL if signal.getsignal(signal_number) != signal.SIG_IGN or signal_number != signal.SIGHUP
        ]
        self.previous_handlers = {signal_number: signal.signal(signal_number, self.handle_signal) for signal_number in handled_signals}
        self.thread = threading.Thread(target=self.wait_for_signal, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        for signal_number, handler in self.previous_handlers.items():
            signal.signal(signal_number, handler)
        self.signal_queue.put(None)
        self.thread.join()

    def wait_for_signal(self) -> None:
        if self.signal_queue.get() is not None:
            self.on_stop()

    def handle_signal(self, signal_number: int, frame: object) -> None:
        self.received_signals.append(signal_number)
        self.send_signal(signal_number)
        self.signal_queue.put(signal_number)

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to all commands that run."""
        for process in list(self.processes):
            with contextlib.suppress(OSError):
                process.send_signal(signal_number)

    def run_command(self, command: list[str], on_line: Callable[[bytes], bool]) -> tuple[int, str]:
        """Run a command, and return its exit code and the end of what it says.

        Args:
            command: a program and its arguments.
            hear: shows a line; returns whether it is a record rather than words. The environment of the command asks
                for records (cli/progress.py).
        """
        output, environment = b'', {**os.environ, 'SINKLAB_PROGRESS': 'json'}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            self.processes.add(process)
            if self.received_signals:  # between two commands
                process.send_signal(self.received_signals[-1])
            while line := process.stdout.readline(MAX_LINE_BYTES):
                output = output if on_line(line) else (output + line)[-10_000:]
            self.processes.discard(process)
        return process.returncode, output.decode(errors='replace')
