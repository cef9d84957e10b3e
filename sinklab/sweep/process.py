"""Commands as processes of their own, which get at once every signal that comes here."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable

from sinklab.processes.ending import OF_SIGNAL, STOPPING

LONGEST = 65536  # bytes of a line that are read at once


class Relay:
    """Collects SIGINT, SIGTERM and SIGHUP as long as it is open, and passes them on to the commands that run.

    Args:
        stopping: called once a signal has come, in a thread of its own: a handler must not write files.
    """

    def __init__(self, stopping: Callable[[], None] = lambda: None):
        self.received, self.stopping = [], stopping
        self.children = {}  # {process of a command: whether it has printed that it is stopping}
        self.heard = queue.SimpleQueue()  # the one that a handler may put something into

    def __enter__(self) -> 'Relay':
        hears = [
            number for number in OF_SIGNAL if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP
        ]
        self.earlier = {number: signal.signal(number, self.hear) for number in hears}
        self.thread = threading.Thread(target=self.notify, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.heard.put(None)
        self.thread.join()

    def notify(self) -> None:
        if self.heard.get() is not None:
            self.stopping()

    def hear(self, number: int, frame: object) -> None:
        self.received.append(number)
        self.send(number)
        self.heard.put(number)

    def send(self, number: int) -> None:
        """Send a signal to all commands that run, but the first one only to those that have not received it.

        A terminal sends Ctrl-C to the commands as well. If this process is delayed for more than a second, a command
        would take what is sent here for a second Ctrl-C, and would not save.
        """
        for child, is_stopping in list(self.children.items()):
            if is_stopping and len(self.received) == 1:
                continue
            with contextlib.suppress(OSError):
                child.send_signal(number)

    def run(self, command: list[str], hear: Callable[[bytes], bool]) -> tuple[int, str]:
        """Run a command, and return its exit code and the end of what it says.

        Args:
            command: a program and its arguments.
            hear: shows a line; returns whether it is a record rather than words. The environment of the command asks
                for records (cli/progress.py).
        """
        said, environment = b'', {**os.environ, 'SINKLAB_PROGRESS': 'json'}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
            self.children[child] = False
            if self.received:  # between two commands
                child.send_signal(self.received[-1])
            while line := child.stdout.readline(LONGEST):
                if STOPPING.encode() in line:
                    self.children[child] = True
                said = said if hear(line) else (said + line)[-10_000:]
            del self.children[child]
        return child.returncode, said.decode(errors='replace')
