"""The training loop: steps, and what is due between them."""

import contextlib
import dataclasses
import errno
import functools
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import jax

from sinklab import sharding
from sinklab.attend.choice import Choice
from sinklab.data.batches import Sequences, sequences
from sinklab.folder import Folder, Metrics, ancestry
from sinklab.lease import Lease, Superseded, lease
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import fork, layout, probe, state, step
from sinklab.train.checkpoint import Checkpoints
from sinklab.train.environment import environment
from sinklab.train.evaluation import evaluation
from sinklab.train.listener import Listener
from sinklab.train.outcome import Diverged, Stopped, outcome

TOGETHER = 1.0  # seconds within which a terminal, a scheduler and a sweep send the same signal


def train(
    spec: Spec,
    hardware: Hardware,
    folder: Folder,
    row: dict,
    *listeners: Listener,
    origin: fork.Origin | None = None,
) -> list[dict]:
    """Trains in `folder`, going on from its newest checkpoint or from its origin's, and returns all its records.

    Raises Refusal (a folder that holds a run is then as it was but for its outcome, and no step has been compiled),
    Diverged, or Stopped.
    """
    folder.check(spec)
    with lease(folder.path) as held:
        folder.check(spec)  # as the job has left it that was waited for
        attempt(spec, hardware, folder, row, listeners, origin, held)
    return folder.records()


def attempt(
    spec: Spec,
    hardware: Hardware,
    folder: Folder,
    row: dict,
    listeners: tuple[Listener, ...],
    origin: fork.Origin | None,
    held: Lease,
) -> None:
    """Trains in a folder that no other job is at work in."""
    with outcome(folder), room(folder):
        if forks := origin and not folder.is_claimed():
            fork.check(origin, spec)
        mesh = check(spec, hardware, folder)
        attention = step.choice(spec, hardware)
        data = sequences(spec)
        if forks:
            row = row | {'from': fork.lineage(origin, spec, folder, data.fingerprint)}
        folder.claim(spec, row)
        saved = Checkpoints(folder, spec.checkpoint.keep, data.fingerprint)
        with jax.set_mesh(mesh), contextlib.ExitStack() as after:
            after.callback(saved.close)
            try:
                fork.begin(origin, spec, mesh, folder, saved)
                Run(spec, hardware, mesh, attention, folder, data, saved, listeners, held).train()
            except Superseded:
                after.pop_all()  # what is still being written is not waited for
                raise


def check(spec: Spec, hardware: Hardware, folder: Folder) -> jax.sharding.Mesh:
    """All that can be refused of a run in its folder before the data is read."""
    layout.check(spec, hardware)
    mesh = sharding.mesh(hardware)
    probe.check(spec, memory())
    layout.check_memory(spec, hardware, memory())
    saved, copies = folder.checkpoint_steps(), spec.checkpoint.keep + 1  # one more while the newest is being written
    needed = max(0, copies - len(saved)) * state.size(state.abstract(spec, mesh))
    existing = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free and spec.optimizer.steps not in saved:
        raise Refusal(
            f'{folder} has {free / 1e9:.2f} GB of room, and {copies} checkpoints take {needed / 1e9:.2f} GB more; '
            'make room, choose another --workdir, or lower config.checkpoint.keep'
        )
    return mesh


def memory() -> int:
    """Bytes of memory of the first device."""
    limit = (jax.devices()[0].memory_stats() or {}).get('bytes_limit')
    return limit or os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


@dataclasses.dataclass
class Run:
    """One attempt at a run: its compiled functions, and what has to be done after a step."""

    spec: Spec
    hardware: Hardware
    mesh: jax.sharding.Mesh
    attention: Choice
    folder: Folder
    data: Sequences
    checkpoints: Checkpoints
    listeners: tuple[Listener, ...]
    lease: Lease

    def __post_init__(self):
        self.start = self.folder.start()
        where = self.spec, self.hardware, self.mesh, self.attention.backend
        self.step, self.valid = step.train_step(*where), evaluation(*where)
        self.observe = probe.observer(self.spec, self.mesh)

    def train(self) -> None:
        first = self.checkpoints.latest() or 0
        if self.last(first):
            self.folder.check_end(first)
            return
        self.stopwatch = Stopwatch(self.folder.seconds(first))
        with contextlib.closing(Metrics(self.folder)) as self.metrics, signals() as received:
            self.steps(self.begin(first), first, received)

    def begin(self, first: int) -> dict:
        """The state to go on from, and a note of where that happens; where the run starts it is measured."""
        now = self.checkpoints.restore(first, state.abstract(self.spec, self.mesh)) if first else None
        changes, note = self.folder.changes(self.spec), {'step': first, 'attention': str(self.attention)}
        attempts = [*self.folder.environment().get('attempts', []), note | ({'changes': changes} if changes else {})]
        self.lease.check()
        self.folder.write('environment', environment(self.hardware, str(self.attention), attempts))
        if changes:
            self.folder.write('config', dataclasses.asdict(self.spec))
        said = dict.fromkeys(attempt['attention'] for attempt in reversed(attempts))
        begun = ancestry(self.folder.lineage()) if first == self.start else []
        for listener in self.listeners:
            listener.begin(first, ', earlier '.join(said), [*begun, *changes])
        if first == self.start:
            now = now or state.create(self.spec, self.mesh)
            numbers = self.measure(first, now['params'])
            self.record({'step': first, 'seconds': self.stopwatch.seconds(), **numbers}, written=True)
        return now

    def steps(self, now: dict, first: int, received: list[int]) -> None:
        """A step is settled while the devices work on the next, or at once where something is due after it."""
        unsettled = None
        advance = self.executable(now)
        for number in range(first + 1, self.spec.optimizer.steps + 1):
            now, numbers = advance(now, self.batch(number))
            if unsettled:
                self.settle(*unsettled)
            unsettled = number, numbers
            if received:
                self.lease.stopping()
            if received or self.due(number):
                self.settle(number, numbers, now)
                unsettled = None
            if received:
                self.save(number, now)
                self.checkpoints.wait()
                raise Stopped(received[0], number)
        self.checkpoints.wait()

    def executable(self, now: dict) -> Callable:
        """The compiled step."""
        advance = self.step.lower(now, self.batch(1)).compile()
        self.stopwatch.restart()
        return advance

    def batch(self, number: int) -> jax.Array:
        shape = self.spec.optimizer.batch_size, self.spec.data.length + 1
        return sharding.batch(functools.partial(self.data.batches.rows, number - 1), shape, self.mesh)

    def due(self, number: int) -> bool:
        """Whether something after this step needs its state."""
        often = (self.spec.valid, self.spec.probe, self.spec.checkpoint)
        return self.last(number) or any(is_due(number, part.every_steps) for part in often)

    def last(self, number: int) -> bool:
        return number == self.spec.optimizer.steps

    def settle(self, number: int, numbers: dict[str, jax.Array], now: dict | None = None) -> None:
        """Reads a step's numbers, and does what is due after it; `now` is given where that needs the state."""
        self.lease.check()
        numbers = {name: float(value) for name, value in jax.device_get(numbers).items()}
        if not all(map(math.isfinite, numbers.values())):
            self.checkpoints.drop(number - 1)  # these numbers are of the parameters that it holds
            raise Diverged(number, numbers)
        self.stopwatch.steps += 1
        record = {'step': number, 'seconds': self.stopwatch.seconds(), **numbers}
        logged = is_due(number, self.spec.log.every_steps)
        if logged:
            tokens = self.spec.optimizer.batch_size * self.spec.data.length
            record['speed/tokens_per_second'] = self.stopwatch.pace() * tokens
            record |= self.data.batches.epochs(number)
        measured = self.measure(number, now['params']) if now else {}
        self.record(record | measured, written=bool(logged or measured))
        if now and (self.last(number) or is_due(number, self.spec.checkpoint.every_steps)):
            self.save(number, now)
        if logged or now:
            self.stopwatch.restart()

    def measure(self, number: int, params: dict) -> dict[str, float]:
        """Validation and probe, where due: at their steps, before the first and after the last."""
        numbers, edge = {}, number == self.start or self.last(number)
        if edge or is_due(number, self.spec.valid.every_steps):
            numbers |= self.valid(params, self.data.valid_NT, self.data.is_trigger(self.data.valid_NT[:, :-1]))
        if edge or is_due(number, self.spec.probe.every_steps):
            observed = self.observe(params, self.data.probe_PT)
            probe.save(self.folder.probe(number), observed, probe.setting(self.spec))
            numbers |= probe.numbers(observed, self.spec, self.data.is_trigger(self.data.probe_PT))
        if not all(map(math.isfinite, numbers.values())):
            raise Diverged(number, numbers)
        return numbers

    def record(self, record: dict, written: bool) -> None:
        if written:
            self.lease.check()
            self.metrics.append(record)
        for listener in self.listeners:
            listener.record(record, written)

    def save(self, number: int, now: dict) -> None:
        if self.checkpoints.newest != number:
            self.lease.check()
            self.metrics.sync()
            self.checkpoints.save(number, now)


def is_due(number: int, every_steps: int) -> bool:
    return every_steps > 0 and number % every_steps == 0


class Stopwatch:
    """Seconds of a run over all its attempts, and the pace of its steps."""

    def __init__(self, earlier: float):
        self.start = time.perf_counter() - earlier
        self.restart()

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def restart(self) -> None:
        self.lap, self.steps = time.perf_counter(), 0

    def pace(self) -> float:
        """Steps a second since the last restart."""
        return self.steps / (time.perf_counter() - self.lap)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step can end; one that comes later than together acts at once."""
    received, first = [], time.monotonic()

    def hear(number, frame):
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
            os.write(2, b'\nstopping after this step; once more to stop at once\n')
        elif time.monotonic() - first > TOGETHER:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def room(folder: Folder) -> Iterator[None]:
    """Says in words that the disk is full; Orbax has its own way of saying it."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, 'errno', None) != errno.ENOSPC and 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise Refusal(
            f'no room is left on the disk of {folder}; its last whole checkpoint is intact: make room and run '
            'the same command again'
        ) from error
