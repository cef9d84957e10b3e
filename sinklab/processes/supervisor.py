"""The parent of a process that computes: starts it, watches it, and ends with the parents of all others."""

import contextlib
import errno
import functools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable

from sinklab.processes.child import Child
from sinklab.processes.cluster import Seat
from sinklab.processes.ending import STOPPING, TOGETHER, End, at_once, before
from sinklab.processes.hub import Hub, Judge
from sinklab.processes.patience import Patience
from sinklab.processes.wire import STRANGE, Wire
from sinklab.record import Refusal

RETRY = 0.2  # seconds between two attempts to reach process 0


class Supervisor:
    """All it does happens in one thread; the others, and signals, put into `events` what it is to do.

    `failed` is told of an end, and of the noise that came before it; `judge`, of process 0, says whether all begin
    again.
    """

    def __init__(
        self,
        seat: Seat,
        command: list[str],
        patience: Patience,
        failed: Callable[[End, str], None],
        say: Callable[[str], None],
        judge: Judge | None = None,
    ):
        self.seat, self.command, self.patience, self.failed, self.say = seat, command, patience, failed, say
        self.hub = Hub(seat.count, patience, judge) if seat.index == 0 else None
        self.events = queue.SimpleQueue()
        self.wire = self.child = self.verdict = self.asked = None
        self.generation, self.beaten, self.met = 0, 0.0, False
        self.deadline = time.monotonic() + patience.join

    def run(self) -> End:
        """Until all processes have ended; how they have."""
        wanted = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        signals = [
            number for number in wanted if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP
        ]
        earlier = {
            number: signal.signal(number, lambda number, _: self.later(self.signalled, number)) for number in signals
        }
        try:
            self.enter()
            while not self.verdict:
                self.turn()
            return self.verdict
        finally:
            self.leave()
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def later(self, function: Callable, *arguments: object) -> None:
        self.events.put(functools.partial(function, *arguments))

    def turn(self, timeout: float = 0.5) -> None:
        """Does the next thing that is to do."""
        with contextlib.suppress(queue.Empty):
            self.events.get(timeout=min(timeout, self.patience.beat / 2))()
        if time.monotonic() - self.beaten > self.patience.beat and self.events.empty():
            self.beat()

    def enter(self) -> None:
        """Goes to where the supervisors of all processes meet."""
        if self.hub:
            if self.seat.count > 1 and not self.opened():
                return
            connection, other = socket.socketpair()
            self.hub.attach(other)
            self.hub.thread.start()
            self.greet(connection)
        else:
            self.reach()

    def opened(self) -> bool:
        """Waits for a run that is at its end to let go of the port, unless a signal comes first."""
        deadline = time.monotonic() + 2 * self.patience.parting
        while not self.verdict:
            try:
                self.hub.open(self.seat.port)
                return True
            except Refusal as refusal:
                if time.monotonic() > deadline or refusal.__cause__.errno != errno.EADDRINUSE:
                    raise
            self.turn(RETRY)
        return False

    def greet(self, connection: socket.socket) -> None:
        self.wire = Wire(connection, self.patience.silence)
        threading.Thread(target=self.listen, args=(self.wire,), daemon=True).start()
        about = dict(process=self.seat.index, count=self.seat.count, host=socket.gethostname(), pid=os.getpid())
        self.wire.send('hello', **about)

    def reach(self) -> None:
        """Goes to process 0, unless a signal comes first."""
        while not self.verdict:
            try:
                connection = socket.create_connection((self.seat.host, self.seat.port), self.patience.silence)
                if connection.getsockname() != connection.getpeername():  # a port of its own that met itself
                    self.greet(connection)
                    return
                connection.close()
            except OSError as error:
                if time.monotonic() > self.deadline:
                    raise Refusal(
                        f'nobody answers at {self.seat.address} for {self.patience.join:.0f} s ({error}); start '
                        'process 0 on that host, or give its address in --coordinator'
                    ) from error
            self.turn(RETRY)

    def come_again(self, words: str) -> None:
        """Comes again: a run that is at its end will have made room."""
        self.wire.close()
        self.wire = None
        if time.monotonic() > self.deadline:
            self.verdict = End('refused', words)
        else:
            threading.Timer(RETRY, self.later, (self.reach,)).start()

    def listen(self, wire: Wire) -> None:
        for message in wire:
            self.later(self.told, message)
        self.later(self.left, wire)

    def beat(self) -> None:
        self.beaten = time.monotonic()
        if self.wire:
            self.wire.send('beat')
        if self.child:
            self.child.wire.send('beat')
            if silent := self.child.silent(self.patience):
                self.report(silent)

    def told(self, message: dict) -> None:
        """What the hub says."""
        self.met = self.met or message['kind'] != 'later'
        match message:
            case {'kind': 'later', 'words': words}:
                self.come_again(words)
            case {'kind': 'refused', 'words': words}:
                self.verdict = self.verdict or End('refused', words)
            case {'kind': 'over', 'end': end}:
                self.verdict = self.verdict or End(**end)
            case {'kind': 'go', 'generation': generation, 'port': port, 'after': after}:
                self.go(generation, port, after and End(**after))
            case {'kind': 'gathered', 'generation': self.generation, 'values': values}:
                self.child.wire.send('gathered', values=values)

    def left(self, wire: Wire) -> None:
        """The hub is gone, or something else is where it should be."""
        if wire is not self.wire:
            return
        lost = End('lost', f'the supervisor of process 0 ({self.seat.address}) is {wire.why}')
        stranger = End('refused', f'what answers at {self.seat.address} is not process 0 of a run; give its address')
        if self.met or wire.why == STRANGE:
            self.verdict = self.verdict or (lost if self.met else stranger)
        else:  # as a run at its end leaves who comes late
            self.come_again(stranger.words)

    def go(self, generation: int, port: int | None, after: End | None) -> None:
        """Starts the child, in the place of one that has ended or is to."""
        if after:
            self.say(f'{after.words}; starting again')
            self.drop(after)
        self.generation = generation
        if self.asked:
            self.report(before(self.asked[0]))
        else:
            coordinator = port and self.seat.beside(port)
            self.child = Child(
                self.command, self.seat, coordinator, self.patience, functools.partial(self.later, self.heard)
            )

    def heard(self, child: Child, message: dict | None) -> None:
        """What the child says, and at last that it has let go of the line."""
        if child is not self.child:
            return
        match message:
            case None:
                self.report(child.end(self.patience))
            case {'kind': 'at', 'listens': listens, **place}:
                child.at(listens)
                self.send('at', child=child.process.pid, **place)
            case {'kind': 'gather', **given}:
                self.send('gather', **given)
            case {'kind': 'end', **end}:
                child.said = End(**end)

    def send(self, kind: str, **content: object) -> None:
        self.wire.send(kind, generation=self.generation, **content)

    def report(self, end: End) -> None:
        """Lets all know of an end; the hub alone decides what comes of it."""
        if self.wire:
            self.send('end', **end.message())
        else:
            self.verdict = end

    def signalled(self, number: int) -> None:
        """The first signal is the child's, once it has an ear for it; a later one acts at once."""
        now = time.monotonic()
        if self.asked and now - self.asked[1] > TOGETHER:
            self.report(at_once(number))
        if self.asked:
            return
        self.asked = number, now
        if not (self.child and self.child.begun):
            self.report(before(number))
        elif self.child.listens:
            self.child.signal(number)
            if self.seat.index:  # a child that has the terminal says so itself
                self.say(STOPPING)

    def drop(self, end: End) -> None:
        """Ends the child, and keeps what it leaves behind where something is to be looked into."""
        child, self.child = self.child, None
        if child:
            child.kill(stacks=end.wrong)
            if end.wrong:
                self.failed(end, child.tail())

    def leave(self) -> None:
        if self.wire:
            self.wire.close()
        self.drop(self.verdict or End('stopped'))
        if self.hub and self.hub.thread.is_alive():
            self.hub.thread.join(2 * self.patience.parting)
