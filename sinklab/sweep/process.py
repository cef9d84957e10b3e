"""Commands as processes of their own, which get at once every signal that comes here."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable


class Relay:
    """Collects SIGINT and SIGTERM as long as it is open, and passes them on to the commands that run."""

    def __init__(self, stopping: Callable[[], None] = lambda: None):
        self.received, self.children, self.stopping = [], set(), stopping

    def __enter__(self) -> 'Relay':
        self.earlier = {number: signal.signal(number, self.hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)

    def hear(self, number: int, frame: object) -> None:
        self.received.append(number)
        for child in list(self.children):
            child.send_signal(number)
        self.stopping()

    def run(self, command: list[str], name: str = '') -> tuple[int, str]:
        """(exit code, the end of what it says); all that it says is shown, each line after a name if there is one."""
        colors, said = {'FORCE_COLOR': '1'} if sys.stderr.isatty() and not name else {}, b''
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
        with subprocess.Popen(command, env={**os.environ, **colors}, **streams) as child:
            self.children.add(child)
            if self.received:  # between two commands
                child.send_signal(self.received[-1])
            while more := child.stdout.readline() if name else child.stdout.read(65536):
                sys.stderr.buffer.write(name.encode() + more)
                sys.stderr.buffer.flush()
                said = (said + more)[-10_000:]
            self.children.discard(child)
        return child.returncode, said.decode(errors='replace')
