"""Where the supervisors of all processes meet; it lives in that of process 0."""

import contextlib
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from sinklab.processes.ending import End, of_group
from sinklab.processes.member import Member, hung
from sinklab.processes.patience import Patience
from sinklab.processes.wire import Wire
from sinklab.record import Refusal

Judge = Callable[[End, bool], tuple[End, bool]]  # an end, whether all could start again -> the end, whether they do


PORTS, APART = range(1024, 65536), 1000
HELLO = {'process', 'count', 'host', 'pid'}


class Hub:
    """Gathers, watches and decides, in one thread of its own; another thread listens to each connection."""

    def __init__(self, count: int, patience: Patience, judge: Judge):
        self.count, self.patience, self.judge = count, patience, judge
        self.events = queue.SimpleQueue()
        self.members: dict[int, Member] = {}
        self.turned_away: dict[int, str] = {}
        self.generation, self.port, self.server = 0, 0, None
        self.deadline = time.monotonic() + patience.join
        self.over, self.ends = False, {}
        self.gathered: dict[int, dict[int, tuple[str, object]]] = {}
        self.thread = threading.Thread(target=self.run, daemon=True)

    def open(self, port: int) -> None:
        """Lets the supervisors of other processes in."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            self.server = socket.create_server(
                ('', port), family=family, backlog=self.count, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            raise Refusal(
                f'port {port} cannot be opened for the other processes ({os.strerror(error.errno)}); give another '
                'port in --coordinator to all of them, or end what has it'
            ) from error
        self.port, self.deadline = port, time.monotonic() + self.patience.join
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:  # it is closed
                return
            self.attach(connection)

    def attach(self, connection: socket.socket) -> None:
        wire = Wire(connection, self.patience.silence)
        threading.Thread(target=self.listen, args=(wire,), daemon=True).start()

    def listen(self, wire: Wire) -> None:
        for message in wire:
            self.events.put((wire, message))
        self.events.put((wire, None))

    def run(self) -> None:
        beaten = 0.0
        while not self.over or (self.connected() and time.monotonic() < self.deadline):
            with contextlib.suppress(queue.Empty):
                self.handle(*self.events.get(timeout=self.patience.beat / 2))
            now = time.monotonic()
            if now - beaten > self.patience.beat and self.events.empty():  # what has come is older than silence
                beaten = now
                self.tell('beat')
                self.look(now)
        if self.server:
            self.server.close()

    def connected(self) -> list[Member]:
        """The members that can still be told something, without that of process 0."""
        return [member for member in self.members.values() if member.index and not member.wire.why]

    def tell(self, kind: str, **content: object) -> None:
        for member in self.members.values():
            member.wire.send(kind, **content)

    def handle(self, wire: Wire, message: dict | None) -> None:
        member = next((member for member in self.members.values() if member.wire is wire), None)
        kind = message and message.pop('kind')
        if kind == 'hello' and not member and message.keys() == HELLO:
            self.meet(wire, **message)
        elif member and not self.over:
            if kind is None:
                member.child = None
                self.ended(member, End('lost', wire.why))
            elif kind == 'end' and message.pop('generation') == self.generation:
                self.ended(member, End(**message))
            elif kind == 'at' and message.pop('generation') == self.generation:
                member.hear(**message)
            elif kind == 'gather' and message.pop('generation') == self.generation:
                self.gather(member, **message)

    def meet(self, wire: Wire, process: int, count: int, host: str, pid: int) -> None:
        newcomer, holder = Member(process, host, pid, wire), self.members.get(process)
        words, kind = None, 'refused'
        if count != self.count:
            words = (
                f'{newcomer} came with --processes={count}, process 0 with {self.count}; give the same number to all'
            )
        elif process not in range(self.count):
            words = f'--process={process} is not below --processes={self.count}'
        elif self.over or (holder and holder.wire.why):  # the newcomer is of the start that follows
            words, kind = 'the run that is found there is at its end; start all of its processes again', 'later'
        elif holder:
            words = f'--process={process} is taken by {holder}; give each process a number of its own'
        if words:
            if process in range(self.count):
                self.turned_away[process] = words
            wire.send(kind, words=words)  # and leaves it to the other end to close: a reset could overtake this
            return
        self.members[process] = newcomer
        wire.send('beat')
        if len(self.members) == self.count:
            self.go()

    def go(self, after: End | None = None) -> None:
        """Has all of them start their children, at first or again."""
        self.generation += 1
        self.deadline, self.ends, self.gathered = None, {}, {}
        for member in self.members.values():
            member.begin()
        port = free_port(self.port) if self.count > 1 else None
        self.tell('go', generation=self.generation, port=port, after=after and after.message())

    def gather(self, member: Member, number: int, name: str, value: object) -> None:
        """The values of the n-th time that each has come to gather, once all have."""
        came = self.gathered.setdefault(number, {})
        came[member.index] = name, value
        if others := {other: there for other, (there, _) in came.items() if there != name}:
            other, there = others.popitem()
            self.ended(member, End('crashed', f'came to {name!r} when process {other} came to {there!r}'))
        elif len(came) == self.count:
            del self.gathered[number]
            self.tell('gathered', generation=self.generation, values=[came[index][1] for index in range(self.count)])

    def ended(self, member: Member, end: End) -> None:
        """Waits a moment for other ends after the first bad one: they may have caused it."""
        self.ends.setdefault(member.index, end)
        if end.cause != 'done':
            wait = self.patience.orderly if end.orderly else self.patience.settle
            now = time.monotonic()
            self.deadline = min(self.deadline or math.inf, now + wait) if self.generation else now
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Decides, once there is something to decide."""
        waiting = [member for member in self.members.values() if member.index not in self.ends]
        late = self.deadline is not None and now >= self.deadline
        if self.over:
            return
        if self.ends and (late or len(self.ends) == self.count):
            self.decide(of_group(self.ends, [str(self.members.get(index)) for index in range(self.count)]))
        elif late:
            self.decide(End('refused', self.missing()))
        elif self.deadline is None and (end := hung(waiting, self.patience)):
            self.decide(end)

    def missing(self) -> str:
        absent = [index for index in range(self.count) if index not in self.members]
        reasons = [self.turned_away[index] for index in absent if index in self.turned_away]
        return (
            f'process {", ".join(map(str, absent))} of {self.count} did not come within {self.patience.join:.0f} s'
            f'{"".join(f" ({reason})" for reason in reasons)}; start all of them'
        )

    def decide(self, end: End) -> None:
        able = len(self.connected()) == self.count - 1
        end, again = self.judge(end, able)
        if again:
            self.go(end)
            return
        self.over, self.deadline = True, time.monotonic() + self.patience.parting
        self.tell('over', end=end.message())


def free_port(after: int) -> int:
    """A port that nobody listens on, away from those that other jobs of this host are given beside this one's."""
    first = after + APART - PORTS.start
    for port in (PORTS[(first + more) % len(PORTS)] for more in range(len(PORTS))):
        with contextlib.suppress(OSError), socket.create_server(('', port)):
            return port
    raise Refusal('no port of this machine is free')
