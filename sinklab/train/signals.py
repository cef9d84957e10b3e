"""What asks for the end of a run from outside."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from sinklab import streams
from sinklab.processes.ending import STOPPING_MESSAGE, SAME_SIGNAL_SECONDS

# Not what was there before: a shell script's background jobs are born with SIGINT ignored.
DEFAULT_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


@contextlib.contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that a step can end; a second signal, a second later, acts at once.

    A terminal, a sweep and a supervisor may each pass on the same signal, so that a process receives it several times
    within a second. That counts as one signal, also if the step has ended in the meantime: leaving the context waits
    for the rest of that second, while checkpoints are being written.

    SIGHUP stays ignored where it is, as under nohup; otherwise it is collected as SIGTERM.
    """
    received, first_time = [], None

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        nonlocal first_time
        current_time = time.monotonic()
        if first_time is None:
            first_time = current_time  # before anything during which another signal may be handled
            received.append(signal.SIGTERM if signal_number == signal.SIGHUP else signal_number)
            streams.write_error(f'{streams.get_line_prefix()}{STOPPING_MESSAGE}\n')
        elif current_time - first_time > SAME_SIGNAL_SECONDS:
            signal.signal(signal_number, DEFAULT_HANDLERS[signal_number])
            signal.raise_signal(signal_number)

    is_sighup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by nohup
    previous_handlers = {signal_number: signal.signal(signal_number, handle_signal) for signal_number in DEFAULT_HANDLERS if signal_number != signal.SIGHUP or not is_sighup_ignored}
    try:
        yield received
    finally:
        if first_time is not None:
            time.sleep(max(0.0, first_time + SAME_SIGNAL_SECONDS - time.monotonic()))
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)
