"""What asks for the end of a run from outside."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from sinklab.processes.ending import STOPPING, TOGETHER

# Not what was there before: a shell script's background jobs are born with SIGINT ignored.
AT_ONCE = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step can end; one that comes later than together acts at once."""
    received, first = [], time.monotonic()

    def hear(number, frame):
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
            os.write(sys.stderr.fileno(), f'\n{STOPPING}\n'.encode())
        elif time.monotonic() - first > TOGETHER:
            signal.signal(number, AT_ONCE[number])
            signal.raise_signal(number)

    before = {number: signal.signal(number, hear) for number in AT_ONCE}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
