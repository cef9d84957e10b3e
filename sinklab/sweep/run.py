"""The runs of a sweep, one after another or several at once, and how each has ended."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Protocol

from sinklab.lease import Lease
from sinklab.processes.ending import CAUSES, KIND_OF, of_exit
from sinklab.record import Refusal
from sinklab.sweep.plan import Run
from sinklab.sweep.process import Relay

# The signal by which a sweep ends that was stopped, by the exit code of its run.
SIGNAL_OF = {CAUSES['interrupted'][1]: signal.SIGINT, CAUSES['stopped'][1]: signal.SIGTERM}
FAILED = {'lost': 'crashed'}  # to a sweep, which goes on with the next run, they are the same


class Watch(Protocol):
    """Shows what runs do."""

    def begin(self, at: str, run: Run) -> None:
        """Hear that a run begins; `at` has its name, and which one it is of how many."""

    def hear(self, run: Run, line: bytes) -> bool:
        """Hear a line of a run's process; return whether it is a record rather than words."""

    def end(self, run: Run) -> None:
        """Hear that a run has ended, or was stopped."""

    def stopping(self) -> None:
        """Hear that a signal has come that stops all runs."""

    def say(self, text: str) -> None:
        """Show a line about a run."""


def train(
    runs: list[Run], command: Callable[[Run], list[str]], watch: Watch, held: Lease, jobs: int = 1
) -> int | None:
    """Run what is to do, `jobs` at once; return the signal that has ended it before its time."""
    if jobs > 1:
        prepare(runs)
    cores = iter(shares(jobs))

    def stopping() -> None:
        watch.stopping()
        held.stopping()

    with Relay(stopping) as relay, ThreadPoolExecutor(jobs, initializer=lambda: stay(next(cores))) as pool:

        def attempt(at: str, run: Run) -> None:
            if run.outcome != 'to do':
                watch.say(f'{at}: {run.outcome} before; to run it again, delete {run.folder}')
            elif not relay.received:
                held.check()
                watch.begin(at, run)
                run.forget()
                code, said = relay.run(command(run), hear=lambda line: watch.hear(run, line))
                conclude(run, relay, code, said)
                watch.end(run)

        turns = [f'[{number}/{len(runs)}] {run}' for number, run in enumerate(runs, 1)]
        attempts = [pool.submit(attempt, at, run) for at, run in zip(turns, runs, strict=True)]
        try:
            for done in as_completed(attempts):
                done.result()
        except BaseException:
            for waiting in attempts:
                waiting.cancel()
            relay.received.append(signal.SIGTERM)  # for a command that is being started right now
            relay.send(signal.SIGTERM)  # they save, and the sweep ends with what this attempt has raised
            raise
    return relay.received[0] if relay.received and any(run.outcome == 'to do' for run in runs) else None


def prepare(runs: list[Run]) -> None:
    """Makes a store of each text while all cores are free for that; what is wrong with one, its runs say."""
    from sinklab.data.corpus import corpus

    specs = [run.spec for run in runs if run.outcome == 'to do' and run.spec.data.task == 'text']
    for data, vocabulary in dict.fromkeys((replace(spec.data, seed=0), spec.model.vocabulary) for spec in specs):
        with contextlib.suppress(Exception):
            corpus(data, vocabulary)


def conclude(run: Run, relay: Relay, code: int, said: str) -> None:
    """What has become of a run; one that was stopped is still to do, and no other is begun."""
    kind, message = ending(run.last_outcome(), code, said)
    if kind == 'stopped':
        relay.received.append(SIGNAL_OF.get(code, -code))
    elif kind in ('done', 'diverged') or not relay.received:
        run.outcome, run.reason = kind, message


def shares(jobs: int) -> list[Iterable[int] | None]:
    """The cores of each of several jobs; None: all, or nobody has a say in it here. Raises Refusal."""
    if jobs < 1:
        raise Refusal(f'--jobs={jobs} must be a whole number of at least 1')
    if jobs == 1 or not hasattr(os, 'sched_getaffinity'):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [cores[job % len(cores) :: jobs] for job in range(jobs)]


def stay(cores: Iterable[int] | None) -> None:
    """Keeps this thread, and the processes that it starts, on some cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


def ending(written: dict, code: int, said: str) -> tuple[str, str]:
    """(kind, message) as the run has written them; of one that could not, its exit code and its last line."""
    if written:
        kind, message = written['kind'], written.get('message', '')
    elif code < 0:
        end = of_exit(code, begun=False, noise='')
        kind, message = end.kind, end.words
    else:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        kind = KIND_OF.get(code, 'crashed')
        message = lines[-1] if lines else f'exit code {code}, without a word'
    return FAILED.get(kind, kind), message
