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

from sinklab.processes.child import Child
from sinklab.processes.cluster import Seat
from sinklab.processes.ending import STOPPING, TOGETHER, End, at_once, before
from sinklab.processes.hub import Hub, Judge
from sinklab.processes.patience import Patience
from sinklab.processes.secret import VARIABLE, RunSecret, create_secret, find_secret, read_variable
from sinklab.processes.wire import (
    FROM_HUB,
    STRANGE,
    At,
    Beat,
    Challenge,
    Ended,
    Gather,
    Gathered,
    Go,
    Hello,
    Later,
    Message,
    Over,
    Refused,
    Welcome,
    Wire,
    host_name,
)
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
        self.hub = Hub(seat.count, patience, judge, say) if seat.index == 0 else None
        self.events = queue.SimpleQueue()
        self.wire = self.child = self.verdict = self.asked = None
        self.generation, self.beaten, self.met = 0, 0.0, False
        self.deadline = time.monotonic() + patience.join
        self.secret, self.nonces = RunSecret(), ('', '')

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
        if self.wire and not self.met and not self.hub and time.monotonic() > self.deadline + self.patience.silence:
            self.verdict = self.verdict or End('refused', self.wrong_address)  # who says something, and never enough

    @property
    def wrong_address(self) -> str:
        return f'what answers at {self.seat.address} is not process 0 of a run; give its address'

    def enter(self) -> None:
        """Goes to where the supervisors of all processes meet."""
        read_variable()
        if self.hub:
            if self.seat.count > 1 and not self.opened():
                return
            if self.seat.count > 1:  # before anybody is answered, who may then look for it
                self.hub.secret = self.secret = create_secret(self.seat)
                self.warn_without_secret()
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
                if reason := self.hub.open(self.seat.host, self.seat.port):
                    self.say(f'process 0 listens on all interfaces of this machine ({reason})')
                return True
            except Refusal as refusal:
                if time.monotonic() > deadline or refusal.__cause__.errno != errno.EADDRINUSE:
                    raise
            self.turn(RETRY)
        return False

    def warn_without_secret(self) -> None:
        if not self.secret.text:
            self.say(
                f'{VARIABLE} is not set, and whoever reaches {self.seat.address} can end this run; set it to the '
                'same random text for all processes'
            )

    def greet(self, connection: socket.socket) -> None:
        self.wire = Wire(connection, self.patience.silence, FROM_HUB)
        threading.Thread(target=self.listen, args=(self.wire,), daemon=True).start()

    def answer_challenge(self, challenge: Challenge) -> None:
        """Say who this is, and prove that it knows the secret."""
        if not self.hub:
            self.secret = find_secret(self.seat)
        self.nonces = challenge.nonce, secrets.token_hex(32)
        index, count = self.seat.index, self.seat.count
        proof = self.secret.prove('process', *self.nonces, index, count)
        self.wire.send(Hello(index, count, host_name(), os.getpid(), self.nonces[1], proof))

    def check_welcome(self, welcome: Welcome) -> None:
        """Go on, if it is the hub that welcomes."""
        expected = self.secret.prove('hub', *self.nonces, self.seat.index, self.seat.count)
        if hmac.compare_digest(welcome.proof, expected) and self.nonces[0]:
            self.met = True
        else:
            self.wire.reject()

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
            self.later(self.told, wire, message)
        self.later(self.left, wire)

    def beat(self) -> None:
        self.beaten = time.monotonic()
        if self.wire:
            self.wire.send(Beat())
        if self.child:
            self.child.wire.send(Beat())
            if silent := self.child.silent(self.patience):
                self.report(silent)

    def told(self, wire: Wire, message: Message) -> None:
        """What the hub says."""
        if wire is not self.wire:
            return
        match message:
            case Challenge() if not self.met:
                self.answer_challenge(message)
            case Welcome() if not self.met:
                self.check_welcome(message)
            case Later(words=words) if not self.met:
                self.come_again(words)
            case Refused(words=words) if not self.met:
                self.verdict = self.verdict or End('refused', words)
            case Beat():
                pass
            case _ if not self.met:
                wire.reject()
            case Over(end=end):
                self.verdict = self.verdict or end
            case Go(generation=generation, port=port, after=after):
                self.go(generation, port, after)
            case Gathered(generation=self.generation) if self.child:
                self.child.wire.send(message)

    def left(self, wire: Wire) -> None:
        """The hub is gone, or something else is where it should be."""
        if wire is not self.wire:
            return
        if self.hub and self.hub.failure:
            self.verdict = self.verdict or self.hub.failure
            return
        lost = End('lost', f'the supervisor of process 0 ({self.seat.address}) is {wire.why}')
        if self.met or wire.why == STRANGE:
            self.verdict = self.verdict or (lost if self.met else End('refused', self.wrong_address))
        else:  # as a run at its end leaves who comes late
            self.come_again(self.wrong_address)

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
            interface = port and self.hub and self.hub.interface
            bind = interface and dataclasses.replace(self.seat, host=interface).beside(port)
            heard = functools.partial(self.later, self.heard)
            self.child = Child(self.command, self.seat, coordinator, bind, self.patience, heard)

    def heard(self, child: Child, message: Message | None) -> None:
        """What the child says, and at last that it has let go of the line."""
        if child is not self.child:
            return
        match message:
            case None:
                self.report(child.end(self.patience))
            case At(listens=listens):
                child.at(listens)
                self.send(msgspec.structs.replace(message, child=child.process.pid))
            case Gather():
                self.send(message)
            case Ended(end=end):
                child.said = end

    def send(self, message: At | Gather | Ended) -> None:
        self.wire.send(msgspec.structs.replace(message, generation=self.generation))

    def report(self, end: End) -> None:
        """Lets all know of an end; the hub alone decides what comes of it."""
        if self.wire:
            self.send(Ended(end))
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
