"""The runs of a sweep, one after another or several at once, and how each has ended."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Protocol

from sinklab.lease import Lease
from sinklab.processes.ending import EXIT_CAUSES, KIND_BY_EXIT_CODE, make_exit_status
from sinklab.record import UserError
from sinklab.sweep.plan import SweepRun
from sinklab.sweep.process import SignalForwarder

# The signal by which a sweep ends that was stopped, by the exit code of its run.
SIGNAL_OF_EXIT_CODE = {EXIT_CAUSES['interrupted'][1]: signal.SIGINT, EXIT_CAUSES['stopped'][1]: signal.SIGTERM}
KIND_ALIASES = {'lost': 'crashed'}  # to a sweep, which goes on with the next run, they are the same


class SweepCallback(Protocol):
    """Shows what runs do."""

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        """Hear that a run begins; `at` has its name, and which one it is of how many."""

    def on_output_line(self, run: SweepRun, line: bytes) -> bool:
        """Hear a line of a run's process; return whether it is a record rather than words."""

    def on_run_end(self, run: SweepRun) -> None:
        """Hear that a run has ended, or was stopped."""

    def on_stop_signal(self) -> None:
        """Hear that a signal has come that stops all runs."""

    def print_line(self, text: str) -> None:
        """Show a line about a run."""


def run_sweep(
    runs: list[SweepRun], command: Callable[[SweepRun], list[str]], callback: SweepCallback, lease: Lease, jobs: int = 1
) -> int | None:
    """Run what is to do, `jobs` at once; return the signal that has ended it before its time."""
    if jobs > 1:
        prepare_stores(runs)
    cores = iter(split_cores(jobs))

    def on_stop() -> None:
        callback.on_stop_signal()
        lease.mark_stopping()

    with SignalForwarder(on_stop) as forwarder, ThreadPoolExecutor(jobs, initializer=lambda: pin_to_cores(next(cores))) as pool:

        def run_one(label: str, run: SweepRun) -> None:
            if run.outcome != 'to do':
                callback.print_line(f'{label}: {run.outcome} before; to run it again, delete {run.run_dir}')
            elif not forwarder.received_signals:
                lease.check()
                callback.on_run_begin(label, run)
                run.delete_outcome()
                exit_code, output = forwarder.run_command(command(run), on_line=lambda line: callback.on_output_line(run, line))
                record_outcome(run, forwarder, exit_code, output)
                callback.on_run_end(run)

        labels = [f'[{number}/{len(runs)}] {run}' for number, run in enumerate(runs, 1)]
        futures = [pool.submit(run_one, label, run) for label, run in zip(labels, runs, strict=True)]
        try:
            for finished in as_completed(futures):
                finished.result()
        except BaseException:
            for pending in futures:
                pending.cancel()
            forwarder.received_signals.append(signal.SIGTERM)  # for a command that is being started right now
            forwarder.send_signal(signal.SIGTERM)  # they save, and the sweep ends with what this attempt has raised
            raise
    return forwarder.received_signals[0] if forwarder.received_signals and any(run.outcome == 'to do' for run in runs) else None


def prepare_stores(runs: list[SweepRun]) -> None:
    """Makes a store of each text while all cores are free for that; what is wrong with one, its runs say."""
    from sinklab.data.corpus import open_corpus

    specs = [run.spec for run in runs if run.outcome == 'to do' and run.spec.data.task == 'text']
    for data, vocabulary in dict.fromkeys((replace(spec.data, seed=0), spec.model.vocabulary) for spec in specs):
        with contextlib.suppress(Exception):
            open_corpus(data, vocabulary)


def record_outcome(run: SweepRun, forwarder: SignalForwarder, exit_code: int, output: str) -> None:
    """What has become of a run; one that was stopped is still to do, and no other is begun."""
    kind, message = classify_exit(run.read_last_outcome(), exit_code, output)
    if kind == 'stopped':
        forwarder.received_signals.append(SIGNAL_OF_EXIT_CODE.get(exit_code, -exit_code))
    elif kind in ('done', 'diverged') or not forwarder.received_signals:
        run.outcome, run.reason = kind, message


def split_cores(jobs: int) -> list[Iterable[int] | None]:
    """The cores of each of several jobs; None: all, or nobody has a say in it here. Raises Refusal."""
    if jobs < 1:
        raise UserError(f'--jobs={jobs} must be a whole number of at least 1')
    if jobs == 1 or not hasattr(os, 'sched_getaffinity'):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [cores[job % len(cores) :: jobs] for job in range(jobs)]


def pin_to_cores(cores: Iterable[int] | None) -> None:
    """Keeps this thread, and the processes that it starts, on some cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


def classify_exit(outcome_record: dict, exit_code: int, output: str) -> tuple[str, str]:
    """(kind, message) as the run has written them; of one that could not, its exit code and its last line."""
    if outcome_record:
        kind, message = outcome_record['kind'], outcome_record.get('message', '')
    elif exit_code < 0:
        exit_status = make_exit_status(exit_code, has_started=False, log_tail='')
        kind, message = exit_status.kind, exit_status.words
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        kind = KIND_BY_EXIT_CODE.get(exit_code, 'crashed')
        message = lines[-1] if lines else f'exit code {exit_code}, without a word'
    return KIND_ALIASES.get(kind, kind), message
