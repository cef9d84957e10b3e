"""One process as the hub knows it, and who keeps the others waiting."""

import dataclasses
import math
import time

from sinklab.processes.connection import Connection
from sinklab.processes.ending import End
from sinklab.processes.patience import Patience
from sinklab.processes.wire import At

APART = ('starting', 'compiling', 'measuring', 'saving', 'restoring', 'ending')
ENDLESS = ('preparing its data',)  # of any size
WORDS = {'step': 'in step {step}', 'reading its batch': 'reading its batch of step {step}'}


@dataclasses.dataclass
class Place:
    """Where a process is: what it does, at which step, since when, and how long that usually takes."""

    name: str = 'starting'
    step: int = 0
    usual: float | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def reached(self) -> tuple[int, bool]:
        """Further on is greater; who computes a step has arrived at it."""
        return self.step, self.name == 'step'

    def bound(self, patience: Patience) -> float:
        """Seconds that it may take."""
        if self.name in ENDLESS:
            return math.inf
        judged = self.usual is not None and self.name not in APART
        return patience.of_step(self.usual) if judged else patience.apart

    def __str__(self) -> str:
        words = WORDS.get(self.name, f'{self.name} at step {{step}}' if self.step else self.name)
        return words.format(step=self.step)


@dataclasses.dataclass
class Member:
    index: int
    host: str
    pid: int
    wire: Connection
    child: int | None = None
    place: Place = dataclasses.field(default_factory=Place)
    excused: float = 0.0  # when it last waited for who was at something that takes its time

    def __str__(self) -> str:
        return f'process {self.index} (host {self.host}, pid {self.child or self.pid})'

    def hear(self, at: At) -> None:
        self.child, self.place = at.child, Place(at.place, at.step, at.usual, time.monotonic() - at.seconds)

    def late(self, patience: Patience) -> bool:
        return time.monotonic() - max(self.place.since, self.excused) > self.place.bound(patience)

    def begin(self) -> None:
        self.child, self.place = None, Place()


def hung(waiting: list[Member], patience: Patience) -> End | None:
    """Whether some wait too long, and for whom. Who is at something that takes its time is waited for."""
    front = max((member.place for member in waiting), key=lambda place: place.reached, default=Place())
    behind = [member for member in waiting if member.place.reached < front.reached]
    if behind and all(member.place.name in APART and not member.late(patience) for member in behind):
        for member in waiting:
            member.excused = member.excused if member in behind else time.monotonic()
    if not any(member.late(patience) for member in waiting):
        return None
    usual = '' if front.usual is None else f', usual {front.usual:.2g} s'
    who = [f'{member} did not arrive ({member.place} for {member.place.seconds:.0f} s)' for member in behind]
    found = '; '.join(who) or ('all are there' if len(waiting) > 1 else 'it has hung')
    return End('hung', f'{front} for {front.seconds:.0f} s{usual}: {found}')
