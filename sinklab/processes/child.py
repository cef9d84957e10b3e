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

from sinklab.processes.cluster import Seat
from sinklab.processes.ending import End, of_exit
from sinklab.processes.link import VARIABLE
from sinklab.processes.patience import Patience
from sinklab.processes.secret import VARIABLE as SECRET
from sinklab.processes.wire import BETWEEN, Message, Wire

TAIL = 100_000  # bytes of what it says beside its words
AT_WORK = 'RSD'  # runs, waits, waits for a disk; and is not stopped
STACKS = 0.5  # seconds to write where all of its threads are


class Child:
    """What it has to say to a terminal goes there, all else into `noise`: the runtime's logs, aborts, stacks."""

    def __init__(
        self,
        command: list[str],
        seat: Seat,
        coordinator: str | None,
        bind: str | None,
        patience: Patience,
        hear: Callable[['Child', Message | None], None],
    ):
        ours, theirs = socket.socketpair()
        self.noise = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child
        terminal = [] if seat.index else [os.dup(1), os.dup(2)]
        given = dict(
            link=theirs.fileno(),
            terminal=terminal,
            index=seat.index,
            count=seat.count,
            coordinator=coordinator,
            bind=bind,
            devices=seat.devices,
            beat=patience.beat,
            silence=2 * patience.silence,
            join=patience.join,
        )
        self.process = subprocess.Popen(
            command,
            env={**{k: v for k, v in os.environ.items() if k != SECRET}, VARIABLE: json.dumps(given)},
            pass_fds=[theirs.fileno(), *terminal],
            stdin=subprocess.DEVNULL,
            stdout=self.noise,
            stderr=self.noise,
            process_group=0,  # a terminal's Ctrl-C comes by way of the parent
        )
        for inherited in (theirs.detach(), *terminal):
            os.close(inherited)
        self.wire, self.said = Wire(ours, None, BETWEEN), None
        self.speaks = self.listens = self.begun = False
        self.since = time.monotonic()
        threading.Thread(target=self.listen, args=(hear,), daemon=True).start()

    def listen(self, hear: Callable) -> None:
        for message in self.wire:
            hear(self, message)
        hear(self, None)

    def at(self, listens: bool) -> None:
        """A sign of life, and whether it has an ear for signals."""
        self.since, self.speaks, self.listens = time.monotonic(), True, listens
        self.begun = self.begun or listens

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def silent(self, patience: Patience) -> End | None:
        """Whether it gives no sign of life. One that computes in C++ may keep the interpreter for a while."""
        seconds = time.monotonic() - self.since
        at_work = state(self.process.pid) in AT_WORK
        bound = patience.silence if not at_work else patience.busy if self.speaks else patience.join
        if seconds < bound:
            return None
        return End('frozen', f'not heard of for {seconds:.0f} s{"" if at_work else ", as if it were stopped"}')

    def end(self, patience: Patience) -> End:
        """How it has ended, once it has let go of its end of the line."""
        try:
            code = self.process.wait(patience.parting)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return self.said or of_exit(code, self.begun, self.tail())

    def kill(self, stacks: bool) -> None:
        """Ends it at once; writes before where all its threads are."""
        if stacks and self.speaks and self.process.poll() is None:
            self.signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STACKS)
        self.process.kill()
        self.process.wait()
        self.wire.close()

    def tail(self) -> str:
        """What it has said of its own failure, and the end of its noise."""
        size = os.fstat(self.noise.fileno()).st_size
        noise = os.pread(self.noise.fileno(), TAIL, max(0, size - TAIL)).decode(errors='replace')
        return f'{self.said.trace if self.said else ""}{noise}'


def state(pid: int) -> str:
    """What the system says of a process, in its letters; ? where it says nothing."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except (OSError, IndexError):
        return '?'
