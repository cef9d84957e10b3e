"""Execution of a sweep's runs in subprocesses, with signals forwarded to them."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Protocol

from sinklab.schema import UserError
from sinklab.storage.lease import Lease
from sinklab.supervisor.exit_status import CAUSE_BY_SIGNAL, EXIT_CAUSES, KIND_BY_EXIT_CODE, make_exit_status
from sinklab.sweep.plan import SweepRun

MAX_LINE_BYTES = 65536  # bytes of a line that are read at once


class SignalForwarder:
    """Collects SIGINT, SIGTERM and SIGHUP as long as it is open, and passes them on to the commands that run.

    Args:
        on_stop: called once a signal has come, in a thread of its own: a handler must not write files.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None):
        self.received_signals, self.processes, self.on_stop = [], set(), on_stop
        self.signal_queue = queue.SimpleQueue()  # the one that a handler may put something into

    def __enter__(self) -> 'SignalForwarder':
        handled_signals = [
            signal_number
            for signal_number in CAUSE_BY_SIGNAL
            if signal.getsignal(signal_number) != signal.SIG_IGN or signal_number != signal.SIGHUP
        ]
        self.previous_handlers = {
            signal_number: signal.signal(signal_number, self.handle_signal) for signal_number in handled_signals
        }
        self.thread = threading.Thread(target=self.wait_for_signal, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        for signal_number, handler in self.previous_handlers.items():
            signal.signal(signal_number, handler)
        self.signal_queue.put(None)
        self.thread.join()

    def wait_for_signal(self) -> None:
        if self.signal_queue.get() is not None:
            self.on_stop()

    def handle_signal(self, signal_number: int, frame: object) -> None:
        self.received_signals.append(signal_number)
        self.send_signal(signal_number)
        self.signal_queue.put(signal_number)

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to all commands that run."""
        for process in list(self.processes):
            with contextlib.suppress(OSError):
                process.send_signal(signal_number)

    def run_command(self, command: list[str], on_line: Callable[[bytes], bool]) -> tuple[int, str]:
        """Run a command, and return its exit code and the end of what it says.

        Args:
            command: a program and its arguments.
            on_line: shows a line; returns whether it is a record rather than words. The environment of the command asks
                for records (cli/progress.py).
        """
        output, environment = b'', {**os.environ, 'SINKLAB_PROGRESS': 'json'}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            self.processes.add(process)
            if self.received_signals:  # between two commands
                process.send_signal(self.received_signals[-1])
            while line := process.stdout.readline(MAX_LINE_BYTES):
                output = output if on_line(line) else (output + line)[-10_000:]
            self.processes.discard(process)
        return process.returncode, output.decode(errors='replace')


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
    runs: list[SweepRun],
    command: Callable[[SweepRun], list[str]],
    callback: SweepCallback,
    lease: Lease,
    jobs: int = 1,
) -> int | None:
    """Run what is to do, `jobs` at once; return the signal that has ended it before its time."""
    if jobs > 1:
        prepare_stores(runs)
    cores = iter(split_cores(jobs))

    def on_stop() -> None:
        callback.on_stop_signal()
        lease.mark_stopping()

    with (
        SignalForwarder(on_stop) as forwarder,
        ThreadPoolExecutor(jobs, initializer=lambda: pin_to_cores(next(cores))) as pool,
    ):

        def run_one(label: str, run: SweepRun) -> None:
            if run.outcome != 'to do':
                callback.print_line(f'{label}: {run.outcome} before; to run it again, delete {run.run_dir}')
            elif not forwarder.received_signals:
                lease.check()
                callback.on_run_begin(label, run)
                run.delete_outcome()
                exit_code, output = forwarder.run_command(
                    command(run), on_line=lambda line: callback.on_output_line(run, line)
                )
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
    return (
        forwarder.received_signals[0]
        if forwarder.received_signals and any(run.outcome == 'to do' for run in runs)
        else None
    )


def prepare_stores(runs: list[SweepRun]) -> None:
    """Makes a store of each text while all cores are free for that; what is wrong with one, its runs say."""
    from sinklab.data.prepare import open_corpus

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
    """The cores of each of several jobs; None: all, or nobody has a say in it here. Raises UserError."""
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
