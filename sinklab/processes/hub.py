"""Where the supervisors of all processes meet; it lives in that of process 0."""

import asyncio
import contextlib
import hmac
import math
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

from sinklab.processes import connection
from sinklab.processes.connection import Connection
from sinklab.processes.ending import End, describe_error, of_group
from sinklab.processes.member import Member, hung
from sinklab.processes.patience import Patience
from sinklab.processes.secret import VARIABLE, RunSecret
from sinklab.processes.wire import (
    At,
    Beat,
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
)
from sinklab.record import Refusal

Judge = Callable[[End, bool], tuple[End, bool]]  # an end, whether all could start again -> the end, whether they do


PORTS, APART = range(1024, 65536), 1000
AT_ITS_END = 'the run that is found there is at its end; start all of its processes again'
WRONG_SECRET = (
    f'process 0 has another secret of the run than this process, or one of them has none; give {VARIABLE} alike to '
    'all processes, or, where all are on one machine, start them as one user with one SINKLAB_CACHE'
)
STRANGERS = 64  # connections without a greeting, beside those that the processes themselves may be opening
GREET = 0.2  # seconds that each of them has at least, however many come
RETRY = 0.2  # seconds until an accept that failed is tried again
QUEUE = 1024  # connections that the system holds until they are accepted


class Hub:
    """Gathers, watches and decides, in one thread of its own, which waits for nobody."""

    def __init__(self, count: int, patience: Patience, judge: Judge, say: Callable[[str], None] = lambda words: None):
        self.count, self.patience, self.judge, self.say = count, patience, judge, say
        self.secret = RunSecret()
        self.members: dict[int, Member] = {}
        self.turned_away: dict[int, str] = {}
        self.generation, self.port, self.interface, self.servers, self.own = 0, 0, None, [], None
        self.strangers: dict[Connection, None] = {}  # without a greeting that was accepted; oldest first
        self.accepting: set[asyncio.Task] = set()
        self.deadline = time.monotonic() + patience.join
        self.over, self.ends = False, {}
        self.failure: End | None = None  # of the hub itself, for a supervisor that it can no longer tell
        self.gathered: dict[int, dict[int, Gather]] = {}
        self.thread = threading.Thread(target=self.work, daemon=True)

    def open(self, host: str, port: int) -> str:
        """Let the supervisors of other processes in.

        Returns:
            Why that is on all interfaces of this machine; '' if it is on that of the host's address alone.
        """
        self.servers, reason = connection.open_listeners(host, port, QUEUE)
        self.port, self.deadline = port, time.monotonic() + self.patience.join
        self.interface = None if reason else self.servers[0].getsockname()[0]
        return reason

    def connection_limit(self) -> int:
        """Return how many connections may be without a greeting, so that most file descriptors stay free."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.count + STRANGERS
        return wanted if allowed == resource.RLIM_INFINITY else min(wanted, max(4, (allowed - self.count) // 4))

    def attach(self, own: socket.socket) -> None:
        """Let the supervisor of process 0 in, before the thread starts."""
        self.own = own

    def work(self) -> None:
        """Do the work of the hub in its thread until the run is over."""
        try:
            asyncio.run(self.run())
        except Exception as error:  # before there was anybody to tell, e.g. without file descriptors for a loop
            self.failure = self.failure or describe_error(error)
        finally:
            self.own.close()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.handle_loop_error)
        self.stirred = asyncio.Event()
        await loop.create_connection(lambda: self.make_connection(Connection.challenge), sock=self.own)
        for server in self.servers:
            server.setblocking(False)
            loop.add_reader(server, self.accept, server)
        beaten = 0.0
        try:
            while not self.over or (self.connected() and time.monotonic() < self.deadline):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stirred.wait(), self.patience.beat / 2)
                self.stirred.clear()
                now = time.monotonic()
                if now - beaten > self.patience.beat:
                    beaten = now
                    with self.end_run_on_error():
                        self.tell(Beat())
                        for one in [*self.strangers, *(member.wire for member in self.members.values())]:
                            one.check(now)
                        self.look(now)
        finally:
            self.secret.remove_file()
            for server in self.servers:
                loop.remove_reader(server)
                server.close()
            for one in [*self.strangers, *(member.wire for member in self.members.values())]:
                one.close()
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def end_run_on_error(self) -> Iterator[None]:
        """End the run for all processes, with the reason, where the hub itself fails."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the run for all processes because of an error of the hub; what has ended already stays as it is."""
        if not self.over:
            self.failure = describe_error(error)
            self.conclude(self.failure)

    def handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """Handle what asyncio reports; an OSError is of one connection, which is closed by then."""
        error = context.get('exception')
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.fail(error)

    def make_connection(self, made: Callable) -> Connection:
        return Connection(self.patience.silence, made, self.receive, self.handle_loss)

    def accept(self, server: socket.socket) -> None:
        """Let one in, in the place of the oldest without a greeting if there are too many of those."""
        if len(self.strangers) + len(self.accepting) >= self.connection_limit():
            oldest = next((one for one in self.strangers if not one.why), None)
            left = GREET - (time.monotonic() - oldest.since) if oldest else GREET
            if left > 0:
                self.pause_accepting(server, left)
            else:
                oldest.drop('one of too many')
            return
        try:
            accepted, _ = server.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        except OSError:  # no file descriptors, or no memory
            self.pause_accepting(server, RETRY)
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(
            loop.connect_accepted_socket(lambda: self.make_connection(self.challenge_newcomer), accepted)
        )
        self.accepting.add(task)
        task.add_done_callback(self.accepting.discard)

    def pause_accepting(self, server: socket.socket, seconds: float) -> None:
        """Accept nobody for a while; the system holds who comes."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(server)
        loop.call_later(seconds, lambda: server.fileno() < 0 or loop.add_reader(server, self.accept, server))

    def challenge_newcomer(self, newcomer: Connection) -> None:
        self.strangers[newcomer] = None
        newcomer.challenge()

    def connected(self) -> list[Member]:
        """The members that can still be told something, without that of process 0."""
        return [member for member in self.members.values() if member.index and not member.wire.why]

    def tell(self, message: Message) -> None:
        for member in self.members.values():
            member.wire.send(message)

    def member_of(self, wire: Connection) -> Member | None:
        return next((member for member in self.members.values() if member.wire is wire), None)

    def handle_loss(self, wire: Connection) -> None:
        self.strangers.pop(wire, None)
        self.stirred.set()
        with self.end_run_on_error():
            if (member := self.member_of(wire)) and not self.over:
                member.child = None
                self.ended(member, End('lost', wire.why))

    def receive(self, wire: Connection, message: Message) -> None:
        with self.end_run_on_error():
            self.handle(wire, message)

    def handle(self, wire: Connection, message: Message) -> None:
        member = self.member_of(wire)
        if not member:
            if isinstance(message, Hello):
                self.meet(wire, message)
        elif not self.over and getattr(message, 'generation', None) == self.generation:
            match message:
                case Ended(end=end):
                    self.ended(member, end)
                case At():
                    member.hear(message)
                case Gather():
                    self.gather(member, message)

    def meet(self, wire: Connection, hello: Hello) -> None:
        process, count = hello.process, hello.count
        newcomer, holder = Member(process, hello.host, hello.pid, wire), self.members.get(process)
        about = wire.nonce, hello.nonce, process, count
        ending = self.over or any(member.wire.why for member in self.members.values())
        words, kind = None, Refused
        if not hmac.compare_digest(hello.proof, self.secret.prove('process', *about)):
            # Of a start that follows, which may have a secret of its own, or of nobody.
            wire.send(Later(AT_ITS_END) if ending else Refused(WRONG_SECRET))
            if not ending:
                self.turn_away_without_secret(process)
            return
        if count != self.count:
            words = (
                f'{newcomer} came with --processes={count}, process 0 with {self.count}; give the same number to all'
            )
        elif process not in range(self.count):
            words = f'--process={process} is not below --processes={self.count}'
        elif self.over or (holder and holder.wire.why):  # the newcomer is of the start that follows
            words, kind = AT_ITS_END, Later
        elif holder:
            words = f'--process={process} is taken by {holder}; give each process a number of its own'
        if words:
            if process in range(self.count):
                self.turned_away[process] = words
            wire.send(kind(words))  # and leaves it to the other end to close: a reset could overtake this
            return
        self.strangers.pop(wire, None)
        self.members[process] = newcomer
        wire.is_known, wire.heard = True, time.monotonic()
        wire.send(Welcome(self.secret.prove('hub', *about)))
        if len(self.members) == self.count:
            self.go()

    def turn_away_without_secret(self, process: int) -> None:
        """Say, once for each process that is waited for, that one came in its name with another secret.

        Process 0 waits on: whoever has not proved the secret may be a stranger, who must not end the run.
        """
        if process in range(self.count) and process not in (*self.members, *self.turned_away):
            self.turned_away[process] = f'one that came as process {process} had another secret: {VARIABLE} differs'
            self.say(f'turned away: {self.turned_away[process]}; process 0 still waits for process {process}')

    def go(self, after: End | None = None) -> None:
        """Has all of them start their children, at first or again."""
        self.generation += 1
        self.deadline, self.ends, self.gathered = None, {}, {}
        for member in self.members.values():
            member.begin()
        port = free_port(self.port) if self.count > 1 else None
        self.tell(Go(self.generation, port, after))

    def gather(self, member: Member, message: Gather) -> None:
        """The values of the n-th time that each has come to gather, once all have."""
        came = self.gathered.setdefault(message.number, {})
        came[member.index] = message
        others = ((index, other.name) for index, other in came.items() if other.name != message.name)
        if other := next(others, None):
            index, name = other
            self.ended(member, End('crashed', f'came to {message.name!r} when process {index} came to {name!r}'))
        elif len(came) == self.count:
            del self.gathered[message.number]
            self.tell(Gathered([came[index].value for index in range(self.count)], self.generation))

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
        else:
            self.conclude(end)

    def conclude(self, end: End) -> None:
        """End the run, and tell all processes how."""
        self.over, self.deadline = True, time.monotonic() + self.patience.parting
        self.tell(Over(end))
        self.stirred.set()


def free_port(after: int) -> int:
    """A port that nobody listens on, away from those that other jobs of this host are given beside this one's."""
    first = after + APART - PORTS.start
    for port in (PORTS[(first + more) % len(PORTS)] for more in range(len(PORTS))):
        with contextlib.suppress(OSError), socket.create_server(('', port)):
            return port
    raise Refusal('no port of this machine is free')
