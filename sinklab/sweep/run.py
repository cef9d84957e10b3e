"""Execution of the runs of a sweep in subprocesses, with signals forwarded to them."""

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

from sinklab.errors import UserError
from sinklab.exit_status import STOP_SIGNALS, STOPPING_MESSAGE
from sinklab.sweep.plan import SweepRun

PROGRESS_VARIABLE = 'SINKLAB_PROGRESS'  # environment variable: json has the run write records for its sweep
MAX_LINE_BYTES = 65536  # a longer line of output is read in parts


class SignalForwarder:
    """A context manager that records SIGINT, SIGTERM and SIGHUP and forwards them to running commands.

    SIGHUP is not handled if the process ignores it.

    Args:
        on_stop: Called once, after the first signal, in a separate thread, because a signal handler must not write
            files.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None):
        self.received_signals, self.on_stop = [], on_stop
        self.processes = {}  # {process of a running command: whether it has printed that it is stopping}
        self.signal_queue = queue.SimpleQueue()  # its `put` is reentrant, so a signal handler may call it

    def __enter__(self) -> 'SignalForwarder':
        handled_signals = [
            signal_number
            for signal_number in STOP_SIGNALS
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
        """Send a signal to all running commands, but the first signal only to those that have not received it.

        A terminal sends Ctrl-C to the commands as well. If this process is delayed for more than a second, a command
        would take the forwarded signal for a second Ctrl-C, and would not save.
        """
        for process, is_stopping in list(self.processes.items()):
            if is_stopping and len(self.received_signals) == 1:
                continue
            with contextlib.suppress(OSError):
                process.send_signal(signal_number)

    def run_command(self, command: list[str], on_line: Callable[[bytes], bool]) -> tuple[int, str]:
        """Run a command in a subprocess, and return its exit code and the end of its output.

        Args:
            command: The program and its arguments. It is asked for progress records by the environment variable
                SINKLAB_PROGRESS (cli/progress.py).
            on_line: Function that shows a line of output. It returns whether the line is a progress record, which is
                left out of the returned output.

        Returns:
            The exit code, negative if a signal ended the command, and at most the last 10,000 bytes of the output.
        """
        output, environment = b'', {**os.environ, PROGRESS_VARIABLE: 'json'}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            self.processes[process] = False
            if self.received_signals:  # a signal arrived before this command was in `processes`
                process.send_signal(self.received_signals[-1])
            while line := process.stdout.readline(MAX_LINE_BYTES):
                if STOPPING_MESSAGE.encode() in line:
                    self.processes[process] = True
                output = output if on_line(line) else (output + line)[-10_000:]
            del self.processes[process]
        return process.returncode, output.decode(errors='replace')


# {exit code of a stopped run: signal with which the sweep ends}; Popen returns -N for signal N.
SIGNAL_OF_EXIT_CODE = {code: number for number in STOP_SIGNALS for code in (128 + number, -number)}


class SweepCallback(Protocol):
    """Interface of a progress display of a sweep."""

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        """Handle the beginning of a run; `label` has its name, its number and the number of runs."""

    def on_output_line(self, run: SweepRun, line: bytes) -> bool:
        """Handle a line of output of a run; return whether it is a progress record rather than text."""

    def on_run_end(self, run: SweepRun) -> None:
        """Handle the end of a run, also if it was stopped."""

    def on_stop_signal(self) -> None:
        """Handle the first signal, which stops all runs."""

    def print_line(self, text: str) -> None:
        """Print a line about a run."""


def run_sweep(
    runs: list[SweepRun],
    command: Callable[[SweepRun], list[str]],
    callback: SweepCallback,
    check_owner: Callable[[], None],
    jobs: int = 1,
) -> int | None:
    """Run all runs whose outcome is `to do`, and set their outcomes.

    Args:
        runs: The runs of `plan_runs`.
        command: Function that returns the command line of a run.
        callback: The progress display.
        check_owner: Raises if another job has taken over the folder of the sweep; called before each run.
        jobs: The number of runs at once. Several jobs split the CPU cores between them.

    Returns:
        The signal that stopped the sweep early; None if no run is left to do or no signal arrived.

    Raises:
        UserError: `jobs` is less than 1.
        LeaseLostError: Another job holds the folder.
    """
    if jobs > 1:
        prepare_stores(runs)
    cores = iter(split_cores(jobs))

    def on_stop() -> None:
        callback.on_stop_signal()
        pass

    with (
        SignalForwarder(on_stop) as forwarder,
        ThreadPoolExecutor(jobs, initializer=lambda: pin_to_cores(next(cores))) as pool,
    ):

        def run_one(label: str, run: SweepRun) -> None:
            if run.outcome != 'to do':
                callback.print_line(f'{label}: {run.outcome} before; to run it again, delete {run.run_dir}')
            elif not forwarder.received_signals:
                check_owner()
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
            forwarder.received_signals.append(signal.SIGTERM)  # stops a command that is being started right now
            forwarder.send_signal(signal.SIGTERM)  # the runs save their state; then the sweep raises the error
            raise
    return (
        forwarder.received_signals[0]
        if forwarder.received_signals and any(run.outcome == 'to do' for run in runs)
        else None
    )


def prepare_stores(runs: list[SweepRun]) -> None:
    """Create the token stores of all runs that are to do, while all cores are free.

    Errors are suppressed, because the runs that need the store report them.
    """
    from sinklab.data.prepare import open_corpus

    specs = [run.spec for run in runs if run.outcome == 'to do' and run.spec.data.task == 'text']
    for data, vocabulary in dict.fromkeys((replace(spec.data, seed=0), spec.model.vocabulary) for spec in specs):
        with contextlib.suppress(Exception):
            open_corpus(data, vocabulary)


def record_outcome(run: SweepRun, forwarder: SignalForwarder, exit_code: int, output: str) -> None:
    """Set the outcome of a run that has exited.

    A stopped run stays `to do`, and no other run begins after it, because it counts as a received signal. After a
    signal, only `done` and `diverged` are recorded.
    """
    kind, message = classify_exit(run.read_last_outcome(), exit_code, output)
    if kind == 'stopped':
        forwarder.received_signals.append(SIGNAL_OF_EXIT_CODE.get(exit_code, signal.SIGTERM))
    elif kind in ('done', 'diverged') or not forwarder.received_signals:
        run.outcome, run.reason = kind, message


def split_cores(jobs: int) -> list[Iterable[int] | None]:
    """Split the available CPU cores between jobs.

    Args:
        jobs: The number of jobs.

    Returns:
        The cores of each job; None for all cores, if there is one job or the platform cannot pin threads.

    Raises:
        UserError: `jobs` is less than 1.
    """
    if jobs < 1:
        raise UserError(f'--jobs={jobs} must be a whole number of at least 1')
    if jobs == 1 or not hasattr(os, 'sched_getaffinity'):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [cores[job % len(cores) :: jobs] for job in range(jobs)]


def pin_to_cores(cores: Iterable[int] | None) -> None:
    """Pin this thread, and the processes that it starts, to CPU cores; do nothing if `cores` is None."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


def classify_exit(outcome_record: dict, exit_code: int, output: str) -> tuple[str, str]:
    """Return the outcome kind of a run and its message.

    Args:
        outcome_record: The content of outcome.json; {} if the run could not write it. Then the kind and the message
            come from the exit code and the last line of output.
        exit_code: The exit code of the process, negative for a signal.
        output: The end of the output.
    """
    if outcome_record:
        kind, message = outcome_record['kind'], outcome_record.get('message', '')
        return 'crashed' if kind == 'lost' else kind, message  # a sweep continues with the next run after both
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if exit_code < 0:
        message = f'killed by {signal.Signals(-exit_code).name}'
    else:
        message = lines[-1] if lines else f'exit code {exit_code}, without a message'
    if exit_code in SIGNAL_OF_EXIT_CODE:
        return 'stopped', message
    return {0: 'done', 1: 'refused', 3: 'diverged'}.get(exit_code, 'crashed'), message
