"""Signals at random moments of the start of a command, with its exit codes and the lines that it prints afterwards.

  python tests/faults/interrupts.py --signal=INT --count=20 --seconds=3 -- python -m sinklab --help

Give each repetition a folder of its own by writing {} in the command.
"""

import argparse
import collections
import dataclasses
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

TIMEOUT = 60.0  # seconds after the signal, after which the command counts as still running


@dataclasses.dataclass(frozen=True)
class InterruptResult:
    """End of one interrupted command.

    Attributes:
        delay: seconds from its start to the signal.
        exit_code: its exit code as a shell reports it, 128 + N after death by signal N; None if it was still running.
        lines: its lines on standard error since the signal.
        finished: whether it had ended before the signal.
    """

    delay: float
    exit_code: int | None
    lines: tuple[str, ...]
    finished: bool


def interrupt(command: Sequence[str], delay: float, signal_number: int) -> InterruptResult:
    """Start a command, send it a signal after `delay` seconds, and wait for its end."""
    with tempfile.TemporaryFile('w+') as stderr_file, tempfile.TemporaryDirectory() as folder:
        arguments = [part.replace('{}', folder) for part in command]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr_file)
        # Background jobs of a shell ignore SIGINT, and their children inherit this.
        process = subprocess.Popen(
            arguments, **streams, preexec_fn=lambda: signal.signal(signal_number, signal.SIG_DFL)
        )
        time.sleep(delay)
        finished, stderr_offset = process.poll() is not None, stderr_file.seek(0, 2)
        if not finished:
            process.send_signal(signal_number)
        try:
            exit_code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            exit_code = None
        stderr_file.seek(stderr_offset)
        lines = tuple(line for line in stderr_file.read().splitlines() if line)
        return InterruptResult(
            delay, 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code, lines, finished
        )


def interrupt_repeatedly(
    command: Sequence[str], count: int, seconds: float, signal_number: int, seed: int = 0
) -> Iterator[InterruptResult]:
    """Interrupt a command at `count` random moments of its first seconds, and yield each result."""
    rng = random.Random(seed)
    for _ in range(count):
        yield interrupt(command, rng.uniform(0, seconds), signal_number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--signal', default='INT', choices=['INT', 'TERM', 'HUP'])
    parser.add_argument('--count', type=int, default=20)
    parser.add_argument('--seconds', type=float, default=3.0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('command', nargs='+')
    arguments = parser.parse_args()
    signal_number = getattr(signal, f'SIG{arguments.signal}')
    results = list(
        interrupt_repeatedly(arguments.command, arguments.count, arguments.seconds, signal_number, arguments.seed)
    )
    for result in sorted(results, key=lambda result: result.delay):
        exit_code = 'went on' if result.exit_code is None else result.exit_code
        print(
            f'{result.delay:.3f} s  {exit_code}{" (finished before)" if result.finished else ""}',
            *result.lines,
            sep='\n    ',
        )
    codes = collections.Counter(
        'went on' if result.exit_code is None else result.exit_code for result in results if not result.finished
    )
    print(f'finished before {sum(result.finished for result in results)}; then: {dict(codes)}; ', end='')
    print(f'most lines {max(len(result.lines) for result in results)}', file=sys.stdout)


if __name__ == '__main__':
    main()
