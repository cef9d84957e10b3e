"""A command as a process of its own, which gets a signal once: from a terminal or a scheduler, or else from here."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

STOPPED = {42: signal.SIGTERM, -signal.SIGTERM: signal.SIGTERM, 130: signal.SIGINT, -signal.SIGINT: signal.SIGINT}
HEARD = b'stopping after this step'  # what a run says when it has got a signal
PATIENCE = 1.0  # seconds for it to say so


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM."""
    received = []
    earlier = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def followed(command: list[str], received: list[int]) -> tuple[int, str]:
    """Runs a command, passing on what it says: (exit code, the end of that).

    Ctrl-C and most schedulers send a signal to the run as well, and a second one would stop it unsaved. So one that
    was received here is passed on only where the run does not say that it has heard.
    """
    colors = {'FORCE_COLOR': '1'} if sys.stderr.isatty() else {}
    said, heard, deadline = b'', False, time.monotonic()
    with subprocess.Popen(
        command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **colors}
    ) as child:
        while True:
            if select.select([child.stdout], [], [], PATIENCE / 4)[0]:
                if not (more := child.stdout.read(65536)):
                    break
                sys.stderr.buffer.write(more)
                sys.stderr.buffer.flush()
                said = (said + more)[-10_000:]
                heard = heard or HEARD in said
            if not received:
                deadline = time.monotonic() + PATIENCE
            elif not heard and time.monotonic() > deadline:
                child.send_signal(received[0])
                deadline = time.monotonic() + PATIENCE
    return child.returncode, said.decode(errors='replace')
