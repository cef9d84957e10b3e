"""What asks for the end of a run from outside."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from sinklab import streams
from sinklab.processes.ending import STOPPING, TOGETHER

# Not what was there before: a shell script's background jobs are born with SIGINT ignored.
AT_ONCE = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that a step can end; a second signal, a second later, acts at once.

    A terminal, a sweep and a supervisor may each pass on the same signal, so that a process receives it several times
    within a second. That counts as one signal, also if the step has ended in the meantime: leaving the context waits
    for the rest of that second, while checkpoints are being written.

    SIGHUP stays ignored where it is, as under nohup; otherwise it is collected as SIGTERM.
    """
    received, first = [], None

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now  # before anything during which another signal may be handled
            received.append(signal.SIGTERM if number == signal.SIGHUP else number)
            streams.write_error(f'{streams.start_of_line()}{STOPPING}\n')
        elif now - first > TOGETHER:
            signal.signal(number, AT_ONCE[number])
            signal.raise_signal(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by nohup
    before = {number: signal.signal(number, hear) for number in AT_ONCE if number != signal.SIGHUP or not ignored}
    try:
        yield received
    finally:
        if first is not None:
            time.sleep(max(0.0, first + TOGETHER - time.monotonic()))
        for number, handler in before.items():
            signal.signal(number, handler)
