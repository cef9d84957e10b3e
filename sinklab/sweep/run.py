"""Execution of the runs of a sweep in subprocesses, to which signals are passed on."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from sinklab.exit_status import STOP_SIGNALS, handle_stop_signals
from sinklab.sweep.plan import SweepRun

# {exit code of a stopped run: signal with which the sweep ends}; Popen returns -N for signal N.
SIGNAL_OF_EXIT_CODE = {code: number for number in STOP_SIGNALS for code in (128 + number, -number)}


class RunningCommands:
    """Commands that run in subprocesses, and the signals that were passed on to them.

    A run saves and stops after the first signal, and ends at once after a second one.
    """

    def __init__(self) -> None:
        self.received_signals: list[int] = []
        self.processes: list[subprocess.Popen] = []

    def send_signal(self, number: int, frame: object = None) -> None:
        self.received_signals.append(number)
        for process in list(self.processes):
            with contextlib.suppress(OSError):
                process.send_signal(number)

    def run(self, command: list[str], on_line: Callable[[bytes], None]) -> tuple[int, str]:
        """Run a command in a subprocess, and return its exit code and the end of its output.

        Args:
            command: The program and its arguments.
            on_line: Function that shows a line of standard error.

        Returns:
            The exit code, negative if a signal ended the command, and at most 10,000 bytes of the end of stderr.
        """
        output = b''
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            self.processes.append(process)
            if self.received_signals:  # it arrived before this command was in `processes`
                process.send_signal(self.received_signals[-1])
            for line in process.stderr:
                on_line(line)
                output = (output + line)[-10_000:]
            self.processes.remove(process)
        return process.returncode, output.decode(errors='replace')


def run_sweep(
    runs: list[SweepRun],
    command: Callable[[SweepRun], list[str]],
    display: Any,
    check_owner: Callable[[], None],
    jobs: int = 1,
) -> int | None:
    """Run all runs whose outcome is `to do`, and set their outcomes.

    Args:
        runs: The runs of `plan_runs`.
        command: Function that returns the command line of a run.
        display: The progress display, `SweepDisplay`.
        check_owner: Called before each run; it raises if another job has taken over the folder of the sweep.
        jobs: The number of runs at once. Several jobs split the CPU cores between them.

    Returns:
        The signal that stopped the sweep early; None if no run is left to do or no signal arrived.
    """
    cores = iter(split_cores(jobs))
    commands = RunningCommands()

    def run_one(label: str, run: SweepRun) -> None:
        if run.outcome != 'to do':
            display.print_line(f'{label}: {run.outcome} before; to run it again, delete {run.run_dir}')
        elif not commands.received_signals:
            check_owner()
            display.on_run_begin(label, run)
            run.run_dir.delete_json('outcome')
            exit_code, output = commands.run(command(run), lambda line: display.on_output_line(run, line))
            record_outcome(run, commands.received_signals, exit_code, output)
            display.on_run_end(run)

    with (
        handle_stop_signals(commands.send_signal),
        ThreadPoolExecutor(jobs, initializer=lambda: pin_to_cores(next(cores))) as pool,
    ):
        labels = [f'[{number}/{len(runs)}] {run}' for number, run in enumerate(runs, 1)]
        unfinished = {pool.submit(run_one, label, run) for label, run in zip(labels, runs, strict=True)}
        try:
            while unfinished:
                finished, unfinished = wait(unfinished, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            commands.send_signal(signal.SIGTERM)  # the running runs save; then the error is raised
            raise
    is_stopped = commands.received_signals and any(run.outcome == 'to do' for run in runs)
    return commands.received_signals[0] if is_stopped else None


def record_outcome(run: SweepRun, received_signals: list[int], exit_code: int, output: str) -> None:
    """Set the outcome of a run that has exited.

    A stopped run stays `to do`, and no other run begins after it, because it counts as a received signal. After a
    signal, only `done` and `diverged` are recorded.
    """
    kind, message = classify_exit(run.read_last_outcome(), exit_code, output)
    if kind == 'stopped':
        received_signals.append(SIGNAL_OF_EXIT_CODE.get(exit_code, signal.SIGTERM))
    elif kind in ('done', 'diverged') or not received_signals:
        run.outcome, run.reason = kind, message


def split_cores(jobs: int) -> list[Iterable[int] | None]:
    """Return the CPU cores of each job; None for all, if there is one job or the platform cannot pin threads."""
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
        kind = outcome_record['kind']
        message = outcome_record.get('message', '')
        return 'crashed' if kind == 'lost' else kind, message  # a sweep continues with the next run after both
    if exit_code == 0:
        return 'done', ''
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    message = lines[-1] if lines else f'exit code {exit_code}, without a message'
    if exit_code < 0:
        message = f'killed by {signal.Signals(-exit_code).name}'
    if exit_code in SIGNAL_OF_EXIT_CODE:
        return 'stopped', message
    return {1: 'refused', 3: 'diverged'}.get(exit_code, 'crashed'), message
