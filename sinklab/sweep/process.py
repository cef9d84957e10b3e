"""Commands as processes of their own, which get at once every signal that comes here."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

from sinklab.escape import escape_control
from sinklab.processes.ending import OF_SIGNAL


class Relay:
    """Collects SIGINT, SIGTERM and SIGHUP as long as it is open, and passes them on to the commands that run.

    Args:
        stopping: called once a signal has come, in a thread of its own: a handler must not write files.
    """

    def __init__(self, stopping: Callable[[], None] = lambda: None):
        self.received, self.children, self.stopping = [], set(), stopping
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
        """Send a signal to all commands that run."""
        for child in list(self.children):
            with contextlib.suppress(OSError):
                child.send_signal(number)

    def run(self, command: list[str], name: str = '') -> tuple[int, str]:
        """(exit code, the end of what it says); all that it says is shown, each line after a name if there is one."""
        colors, said = {'FORCE_COLOR': '1'} if sys.stderr.isatty() and not name else {}, b''
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
        with subprocess.Popen(command, env={**os.environ, **colors}, **streams) as child:
            self.children.add(child)
            if self.received:  # between two commands
                child.send_signal(self.received[-1])
            while more := child.stdout.readline() if name else child.stdout.read(65536):
                sys.stderr.buffer.write(labelled(name, more) if name else more)
                sys.stderr.buffer.flush()
                said = (said + more)[-10_000:]
            self.children.discard(child)
        return child.returncode, said.decode(errors='replace')


def labelled(name: str, line: bytes) -> bytes:
    """Put a name before a line; what would move the cursor back over the name is shown as an escape."""
    said = escape_control(line.decode(errors='backslashreplace').removesuffix('\n'), keep='\t')
    return f'{escape_control(name)}{said}\n'.encode()
