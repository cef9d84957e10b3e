"""The training loop: steps, and what is due between them."""

import contextlib
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
from sinklab.folder import Folder, Metrics
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import probe, state, step
from sinklab.train.checkpoint import Checkpoints
from sinklab.train.environment import environment

Listener = Callable[[dict], None]


class Diverged(ArithmeticError):
    """The loss, its gradient, or what was measured is no longer finite."""

    def __init__(self, number: int, numbers: dict[str, float]):
        wild = ', '.join(f'{name} is {value}' for name, value in numbers.items() if not math.isfinite(value))
        super().__init__(f'{wild} at step {number}')


class Stopped(Exception):
    """A signal asked for the end, and the state is saved."""

    def __init__(self, number: int, at: int):
        super().__init__(f'saved at step {at}')
        self.signal = signal.Signals(number)


def ignore(record: dict) -> None:
    pass


def train(
    spec: Spec,
    hardware: Hardware,
    folder: Folder,
    row: dict,
    progress: Listener = ignore,
    mirror: Listener = ignore,
) -> list[dict]:
    """Trains in `folder`, going on from its newest checkpoint, and returns all its records.

    `progress` hears of every step, `mirror` of every line written. Raises Refusal (a folder that holds a run is then
    as it was, and no step has been compiled), Diverged, or Stopped.
    """
    mesh = check(spec, hardware, folder)
    attention = step.attention(spec, hardware)
    data = sequences(spec)
    with jax.set_mesh(mesh), room(folder):
        folder.claim(spec, row)
        with contextlib.closing(Checkpoints(folder, spec.checkpoint.keep, data.fingerprint)) as checkpoints:
            Run(spec, hardware, mesh, attention, folder, data, checkpoints, progress, mirror).train()
    return folder.records()


def check(spec: Spec, hardware: Hardware, folder: Folder) -> jax.sharding.Mesh:
    """All that can be refused before the data is read."""
    folder.check(spec)
    step.check(spec, hardware)
    mesh = sharding.mesh(hardware)
    probe.check(spec, memory())
    step.check_memory(spec, hardware, memory())
    saved, copies = folder.saved(), spec.checkpoint.keep + 1  # one more while the newest is being written
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


class Run:
    """One attempt at a run: its compiled functions, and what has to be done after a step."""

    def __init__(
        self,
        spec: Spec,
        hardware: Hardware,
        mesh: jax.sharding.Mesh,
        attention: Choice,
        folder: Folder,
        data: Sequences,
        checkpoints: Checkpoints,
        progress: Listener,
        mirror: Listener,
    ):
        self.spec, self.hardware, self.mesh, self.folder, self.data = spec, hardware, mesh, folder, data
        self.checkpoints, self.progress, self.mirror = checkpoints, progress, mirror
        self.attention = attention
        self.step = step.train_step(spec, hardware, mesh, attention.backend)
        self.valid = step.evaluation(spec, hardware, mesh, attention.backend)
        self.observe = probe.observer(spec, mesh)

    def train(self) -> None:
        first = self.checkpoints.latest() or 0
        if self.last(first):
            self.folder.check_end(first)
            return
        self.stopwatch = Stopwatch(self.folder.seconds(first))
        with contextlib.closing(Metrics(self.folder)) as self.metrics, signals() as received:
            now = self.begin(first)
            self.note(first)
            self.steps(now, first, received)

    def note(self, first: int) -> None:
        """Writes where this attempt takes place, and says what computes attention."""
        attempts = [*self.folder.attempts(), {'step': first, 'attention': str(self.attention)}]
        self.folder.write('environment', environment(self.hardware, str(self.attention), attempts))
        said = dict.fromkeys(attempt['attention'] for attempt in reversed(attempts))
        self.progress({'step': first, 'attention': ', earlier '.join(said)})

    def begin(self, first: int) -> dict:
        """The state to go on from; that of a fresh run is measured."""
        if first:
            return self.checkpoints.restore(first, state.abstract(self.spec, self.mesh))
        now = state.create(self.spec, self.mesh)
        record = {'step': 0, 'seconds': self.stopwatch.seconds(), **self.measure(0, now['params'])}
        self.write(record)
        self.progress(record)
        return now

    def steps(self, now: dict, first: int, received: list[int]) -> None:
        """A step is settled while the devices work on the next, or at once where something is due after it."""
        unsettled = None
        advance = self.compiled(now)
        for number in range(first + 1, self.spec.optimizer.steps + 1):
            now, numbers = advance(now, self.batch(number))
            if unsettled:
                self.settle(*unsettled)
            unsettled = number, numbers
            if received or self.due(number):
                self.settle(number, numbers, now)
                unsettled = None
            if received:
                self.save(number, now)
                self.checkpoints.wait()
                raise Stopped(received[0], number)
        self.checkpoints.wait()

    def compiled(self, now: dict) -> Callable:
        compiled = self.step.lower(now, self.batch(1)).compile()
        self.stopwatch.restart()
        return compiled

    def batch(self, number: int) -> jax.Array:
        shape = self.spec.optimizer.batch_size, self.spec.data.length + 1
        return step.shared(functools.partial(self.data.batches.rows, number - 1), shape, self.mesh)

    def due(self, number: int) -> bool:
        """Whether something after this step needs its state."""
        often = (self.spec.valid, self.spec.probe, self.spec.checkpoint)
        return self.last(number) or any(is_due(number, part.every_steps) for part in often)

    def last(self, number: int) -> bool:
        return number == self.spec.optimizer.steps

    def settle(self, number: int, numbers: dict[str, jax.Array], now: dict | None = None) -> None:
        """Reads a step's numbers, and does what is due after it; `now` is given where that needs the state."""
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
        record |= measured
        if logged or measured:
            self.write(record)
        self.progress(record)
        if now and (self.last(number) or is_due(number, self.spec.checkpoint.every_steps)):
            self.save(number, now)
        if logged or now:
            self.stopwatch.restart()

    def measure(self, number: int, params: dict) -> dict[str, float]:
        """Validation and probe, where due: at their steps, before the first and after the last."""
        numbers, edge = {}, number == 0 or self.last(number)
        if edge or is_due(number, self.spec.valid.every_steps):
            numbers |= self.valid(params, self.data.valid_NT, self.data.triggered(self.data.valid_NT[:, :-1]))
        if edge or is_due(number, self.spec.probe.every_steps):
            observed = self.observe(params, self.data.probe_PT)
            probe.save(self.folder.probe(number), observed)
            numbers |= probe.numbers(observed, self.spec, self.data.triggered(self.data.probe_PT))
        if not all(map(math.isfinite, numbers.values())):
            raise Diverged(number, numbers)
        return numbers

    def write(self, record: dict) -> None:
        self.metrics.append(record)
        self.mirror(record)

    def save(self, number: int, now: dict) -> None:
        if self.checkpoints.newest != number:
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
    """Collects SIGINT and SIGTERM, so that a step can end; a second one acts at once."""
    received = []

    def note(number, frame):
        received.append(number)
        signal.signal(number, before[number])
        os.write(2, b'\nstopping after this step; once more to stop at once\n')

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
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
