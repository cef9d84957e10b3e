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
class Interrupted:
    """End of one interrupted command.

    Attributes:
        moment: seconds from its start to the signal.
        code: its exit code as a shell reports it, 128 + N after death by signal N; None if it was still running.
        lines: its lines on standard error since the signal.
        finished: whether it had ended before the signal.
    """

    moment: float
    code: int | None
    lines: tuple[str, ...]
    finished: bool


def interrupt(command: Sequence[str], moment: float, number: int) -> Interrupted:
    """Start a command, send it a signal after `moment` seconds, and wait for its end."""
    with tempfile.TemporaryFile('w+') as errors, tempfile.TemporaryDirectory() as folder:
        arguments = [part.replace('{}', folder) for part in command]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        # Background jobs of a shell ignore SIGINT, and their children inherit this.
        process = subprocess.Popen(arguments, **streams, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
        time.sleep(moment)
        finished, written = process.poll() is not None, errors.seek(0, 2)
        if not finished:
            process.send_signal(number)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        errors.seek(written)
        lines = tuple(line for line in errors.read().splitlines() if line)
        return Interrupted(moment, 128 - code if code is not None and code < 0 else code, lines, finished)


def interrupt_repeatedly(
    command: Sequence[str], count: int, seconds: float, number: int, seed: int = 0
) -> Iterator[Interrupted]:
    """Interrupt a command at `count` random moments of its first seconds, and yield each end."""
    random_moments = random.Random(seed)
    for _ in range(count):
        yield interrupt(command, random_moments.uniform(0, seconds), number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--signal', default='INT', choices=['INT', 'TERM', 'HUP'])
    parser.add_argument('--count', type=int, default=20)
    parser.add_argument('--seconds', type=float, default=3.0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('command', nargs='+')
    arguments = parser.parse_args()
    number = getattr(signal, f'SIG{arguments.signal}')
    ends = list(interrupt_repeatedly(arguments.command, arguments.count, arguments.seconds, number, arguments.seed))
    for end in sorted(ends, key=lambda end: end.moment):
        code = 'went on' if end.code is None else end.code
        print(f'{end.moment:.3f} s  {code}{" (finished before)" if end.finished else ""}', *end.lines, sep='\n    ')
    codes = collections.Counter('went on' if end.code is None else end.code for end in ends if not end.finished)
    print(f'finished before {sum(end.finished for end in ends)}; then: {dict(codes)}; ', end='')
    print(f'most lines {max(len(end.lines) for end in ends)}', file=sys.stdout)


if __name__ == '__main__':
    main()
