"""What asks for the end of a run from outside."""

import contextlib
import signal
import time
from collections.abc import Iterator

from sinklab import streams
from sinklab.processes.ending import STOPPING, TOGETHER

# Not what was there before: a shell script's background jobs are born with SIGINT ignored.
AT_ONCE = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that a step can end; a second signal, a second later, acts at once.

    SIGHUP stays ignored where it is, as under nohup; otherwise it is collected as SIGTERM.
    """
    received, first = [], time.monotonic()

    def hear(number, frame):
        nonlocal first
        if not received:
            received.append(signal.SIGTERM if number == signal.SIGHUP else number)
            first = time.monotonic()
            streams.write_error(f'\n{STOPPING}\n')
        elif time.monotonic() - first > TOGETHER:
            signal.signal(number, AT_ONCE[number])
            signal.raise_signal(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by nohup
    before = {number: signal.signal(number, hear) for number in AT_ONCE if number != signal.SIGHUP or not ignored}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
