"""The training loop: steps, and what is due between them."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator

import jax

from sinklab import sharding
from sinklab.attend.choice import Choice
from sinklab.checkpoint import log_filters
from sinklab.checkpoint.checkpoints import Checkpoints
from sinklab.checkpoint.storage import room
from sinklab.data.batches import Sequences
from sinklab.folder import Folder
from sinklab.group import Alone, Group, difference, once
from sinklab.lease import GRACE, Elsewhere, Lease, Superseded
from sinklab.measure.table import HEADLINE
from sinklab.model import flops
from sinklab.spec import Hardware, Spec
from sinklab.train import fit, fork, probe, replicas, state, step
from sinklab.train.ahead import Ahead
from sinklab.train.environment import environment
from sinklab.train.evaluation import evaluation
from sinklab.train.listener import Listener
from sinklab.train.outcome import Disagreement, Diverged, Stopped, outcome
from sinklab.train.signals import signals
from sinklab.train.start import forked, held, start
from sinklab.train.stopwatch import Stopwatch

# What a process may wish of all; the largest counts. Above these: the number of SIGINT or SIGTERM, to end the run.
NOTHING, SAVE = 0, 1
STEPS_TO_STOP = 3  # at most, from a signal to the state that is saved
AHEAD = 16  # batches that are read and placed before their steps, at most
# What is measured of a state beside its steps, and a number that every one of them leaves in its record.
MEASURED = {'valid': 'valid/loss', 'probe': HEADLINE.name}


def train(
    spec: Spec,
    hardware: Hardware,
    folder: Folder,
    row: dict,
    *listeners: Listener,
    group: Group | None = None,
    origin: fork.Origin | None = None,
    grace: float = GRACE,
) -> list[dict]:
    """Trains in `folder`, going on from its newest checkpoint or from its origin's; process 0 gets all its records.

    `grace` is how many seconds are left to a run that is told to stop. Raises Refusal (before a step is compiled, and
    a run is as it was but for its outcome; later where a program does not fit), Diverged, Stopped, or Disagreement.
    """
    log_filters.install()
    group = group or Alone()
    folder = folder if group.index == 0 else folder.read_only()
    once(group, 'folder', lambda: folder.check(spec))
    with held(folder, group, grace) as lease:
        once(group, 'folder, held', lambda: folder.check(spec))  # as the job has left it that was waited for
        with outcome(folder), room(folder):
            fork.check(origin, spec, folder, group)
            hardware, mesh, attention, data = start(spec, hardware, folder, group)
            row = forked(origin, spec, folder, row, data, group)
            once(group, 'claim', lambda: folder.claim(spec, row, data.tokenizer))
            saved = Checkpoints(folder, spec.checkpoint, data.fingerprint, group, lease.check)
            refusing = fit.refusing_out_of_memory((spec, hardware, mesh, attention.backend))
            with jax.set_mesh(mesh), refusing, closing(saved):
                run = Run(spec, hardware, mesh, attention, folder, data, saved, listeners, group, lease, grace)
                run.train(origin)
    return folder.records(spec.optimizer.steps) if group.index == 0 else []


@contextlib.contextmanager
def closing(saved: Checkpoints) -> Iterator[None]:
    """Waits at the end for what is being written, by all where all end alike; not in a folder of another job."""
    with contextlib.ExitStack() as after:
        after.callback(saved.close)
        try:
            yield
        except Superseded:
            after.pop_all()
            raise
        except (Stopped, Diverged, Disagreement):
            saved.wait_for_all()
            raise
        saved.wait_for_all()


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
    group: Group
    lease: Lease | Elsewhere
    grace: float
    warned: bool = False

    def __post_init__(self):
        self.start = once(self.group, 'start', self.folder.start)
        self.where = where = self.spec, self.hardware, self.mesh, self.attention.backend
        self.fitting = functools.partial(fit.fitting, where=where)
        self.step, self.valid = step.train_step(*where), self.fitting('validation')(evaluation(*where))
        self.observe = self.fitting('the probe')(probe.observer(self.spec, self.mesh))
        self.saved = time.monotonic()
        self.differing = replicas.comparison(self.spec, self.mesh, self.group)
        self.peak = fit.peak(self.mesh)
        self.wishes = functools.cache(functools.partial(sharding.of_each_device, mesh=self.mesh))

    def train(self, origin: fork.Origin | None) -> None:
        first, passed = fork.begin(origin, self.spec, self.mesh, self.start, self.checkpoints)
        lost = once(self.group, 'lost lines', lambda: self.lost_lines(first))
        for line in (*passed, *lost, *self.data.told, *fit.told(*self.where)):
            self.note(line)
        owed = once(self.group, 'owed', lambda: self.owed(first))
        if self.last(first) and not owed:
            return
        self.data.expect(first)
        self.stopwatch = Stopwatch(once(self.group, 'seconds', lambda: self.folder.seconds(first)))
        with self.reporting_fallback(), contextlib.closing(self.folder.metrics(self.lease.check)) as self.metrics:
            now = self.begin(first, owed)
            if not self.last(first):
                advance = self.executable(now)
                with signals() as self.received:
                    self.steps(advance, now, first)

    @contextlib.contextmanager
    def reporting_fallback(self) -> Iterator[None]:
        """Say at the end, however it comes, that a kernel failed here and another backend computed attention.

        The start says it too, thousands of lines earlier.
        """
        try:
            yield
        finally:
            if line := self.attention.describe_fallback():
                self.note(line)

    def begin(self, first: int, owed: list[str]) -> dict:
        """The state to go on from, and a note of where that happens; what is not yet measured of it is."""
        self.group.at('restoring', first)
        known = self.checkpoints.newest == first
        now = self.checkpoints.restore(first, state.abstract(self.spec, self.mesh)) if known else None
        changes, note = self.folder.changes(self.spec), {'step': first, 'attention': str(self.attention)}
        attempts = [*self.folder.environment().get('attempts', []), note | ({'changes': changes} if changes else {})]
        self.lease.check()
        layout = dataclasses.asdict(self.hardware) | dict(self.mesh.shape)
        self.folder.write('environment', environment(layout, str(self.attention), attempts))
        if changes:
            self.folder.write('config', dataclasses.asdict(self.spec))
        for listener in self.listeners:
            listener.begin(*self.folder.beginning(attempts))
        now = now or state.create(self.spec, self.mesh)
        if owed:
            numbers = self.measure(first, now['params'], owed)
            self.record({'step': first, 'seconds': self.stopwatch.seconds(), **numbers}, written=True)
        return now

    def steps(self, advance: Callable, now: dict, first: int) -> None:
        """A step is settled while the devices work on the next, or at once where something is due after it."""
        unsettled, wish, steps = None, NOTHING, range(first + 1, self.spec.optimizer.steps + 1)
        with contextlib.closing(Ahead(self.batch, steps, AHEAD)) as batches:
            for number in steps:
                self.group.at('reading its batch', number)
                with jax.profiler.StepTraceAnnotation('train', step_num=number):
                    now, numbers = advance(now, batches.take(), self.wishes(self.wish()))
                if unsettled:
                    wish = self.settle(*unsettled)
                unsettled = number, numbers
                if wish or self.due(number):
                    self.settle(number, numbers, now, wish)
                    unsettled, wish = None, NOTHING

    def executable(self, now: dict) -> Callable:
        """The compiled step."""
        self.group.at('compiling')
        lowered, fits = self.step.lower(now, *step.given(self.spec, self.mesh)), self.fitting('the step')
        advance = fits(lowered.compile)()
        self.stopwatch.restart()
        return fits(advance)

    def batch(self, number: int) -> jax.Array:
        shape = self.spec.optimizer.batch_size, self.spec.data.length + 1
        return sharding.batch(functools.partial(self.data.batches.rows, number - 1), shape, self.mesh)

    def wish(self) -> int:
        """What this process wishes: the end, if it was told to; a checkpoint, by the clock of process 0."""
        minutes = self.spec.checkpoint.every_minutes
        overdue = minutes and self.group.index == 0 and time.monotonic() - self.saved > 60 * minutes
        return self.received[0] if self.received else SAVE if overdue else NOTHING

    def due(self, number: int) -> bool:
        """Whether something after this step needs its state."""
        return bool(self.measured(number)) or is_due(number, self.spec.checkpoint.every_steps)

    def measured(self, number: int) -> list[str]:
        """What is measured after a step: what is due, and all of it before the first and after the last."""
        edge = number == self.start or self.last(number)
        return [name for name in MEASURED if edge or is_due(number, getattr(self.spec, name).every_steps)]

    def owed(self, number: int) -> list[str]:
        """What should have been measured after a step, and was not: a run that is stopped does not wait for it."""
        known = next((record for record in self.folder.records() if record['step'] == number), {})
        return [name for name in self.measured(number) if MEASURED[name] not in known]

    def lost_lines(self, first: int) -> list[str]:
        """Return what is to be said of the lines up to step `first` that metrics.jsonl has lost."""
        every = self.spec.log.every_steps
        return [*map(self.folder.describe_gap, self.folder.gaps(self.folder.records(), every, first))]

    def last(self, number: int) -> bool:
        return number == self.spec.optimizer.steps

    def settle(self, number: int, numbers: dict[str, jax.Array], now: dict | None = None, wish: int = NOTHING) -> int:
        """Reads a step's numbers, and does what is due after it; `now` is given where that needs the state.

        Returns what has been wished, of which all processes learn here.
        """
        self.lease.check()
        self.group.at('step', number, self.stopwatch.usual)
        numbers = {name: float(value) for name, value in jax.device_get(numbers).items()}
        wish = max(wish, int(numbers.pop('wish')))
        if not all(map(math.isfinite, numbers.values())):
            self.checkpoints.drop(number - 1)  # these numbers are of the parameters that it holds
            raise Diverged(number, numbers)
        self.stopwatch.step()
        record = {'step': number, 'seconds': self.stopwatch.seconds(), **numbers}
        if logged := is_due(number, self.spec.log.every_steps):
            tokens = self.spec.optimizer.batch_size * self.spec.data.length
            record['speed/tokens_per_second'] = self.stopwatch.pace() * tokens
            if self.peak:
                record['speed/mfu'] = self.stopwatch.pace() * flops.step(self.spec) / self.peak
            record |= self.data.batches.epochs(number)
        measured = self.measured(number) if now else []
        if wish <= SAVE:
            record |= self.measure(number, now['params'], measured) if measured else {}
        self.record(record, written=bool(logged or measured))
        if now:
            self.after(number, now, numbers, wish)
        if logged:
            self.checkpoints.poll()
            self.warn()
        if logged or now:
            self.stopwatch.restart()
        return wish

    def after(self, number: int, now: dict, numbers: dict[str, float], wish: int) -> None:
        """Saves, where that is due or wished; ends, where that is wished."""
        if wish or self.last(number) or is_due(number, self.spec.checkpoint.every_steps):
            self.save(number, now, numbers)
        if wish > SAVE:
            self.lease.stopping()
            raise Stopped(wish, number)

    def measure(self, number: int, params: dict, what: list[str]) -> dict[str, float]:
        """Validation and probe."""
        self.group.at('measuring', number)
        numbers = {}
        if 'valid' in what:
            numbers |= self.valid(params, self.data.valid_NT, self.data.valid_triggers())
        if 'probe' in what:
            observed = self.observe(params, self.data.probe_PT)
            self.folder.keep(number, functools.partial(probe.save, kept=observed, setting=probe.setting(self.spec)))
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

    def note(self, line: str) -> None:
        for listener in self.listeners:
            listener.note(line)

    def warn(self) -> None:
        """Says once when what has to be done between a signal and the end does not fit into the time for it."""
        seconds = (self.checkpoints.seconds or 0.0) + STEPS_TO_STOP * (self.stopwatch.usual or 0.0)
        if self.checkpoints.seconds and seconds > self.grace and not self.warned:
            self.warned = True
            self.note(
                f'a save and the steps before it take {seconds:.2g} s, and --grace is {self.grace:g} s: a run that '
                'is told to stop may be killed before it is saved; have more time given, and say so by --grace'
            )

    def save(self, number: int, now: dict, numbers: dict[str, float]) -> None:
        if self.checkpoints.newest != number:
            self.compare(number, now, numbers)
            self.group.at('saving', number)
            self.metrics.sync()
            self.checkpoints.save(number, now)
            self.saved = time.monotonic()

    def compare(self, number: int, now: dict, numbers: dict[str, float]) -> None:
        """Sees that all processes have the same: data, numbers, and the bits of each parameter that several hold."""
        differ = self.differing(number, now['params'])
        if self.group.count > 1 and not differ:
            mine = {'the batch': self.data.batches.mark(number - 1)}
            mine |= {name: value.hex() for name, value in numbers.items()}
            differ = difference(self.group.gather(f'step {number}', mine))
        if differ:
            raise Disagreement(number, differ)


def is_due(number: int, every_steps: int) -> bool:
    return every_steps > 0 and number % every_steps == 0
