"""Filters for what Orbax and TensorStore print of a failed save beside the error that they raise."""

import logging
import sys
import types
from typing import Any

# Orbax keeps what a thread of its has raised, raises it again where the save is waited for, and logs it besides with
# a traceback, once for each thread that waits for the first: 3 to 9 of them, 280 lines, around one line of ours.
THREADS = 'orbax/checkpoint/_src/futures/future.py'
NEVER_RETRIEVED = 'exception was never retrieved'  # of what asyncio says of a task that was waited for with others


def silence_repeated_errors() -> None:
    """Install the filters, once and for the whole process: threads log while the loop of training is elsewhere."""
    import absl.logging  # noqa: F401  makes the logger `absl` of its own class, which getLogger alone would not

    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(is_not_repeated)  # which adds the same filter no second time
    if not isinstance(sys.unraisablehook, WithoutLateCallbacks):
        sys.unraisablehook = WithoutLateCallbacks(sys.unraisablehook)


def is_not_repeated(record: logging.LogRecord) -> bool:
    """Whether to log a record: all but errors of storage that a thread or task of Orbax has raised."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, OSError | ValueError):  # ValueError is what Orbax makes of an error of TensorStore
        return True
    if record.name == 'asyncio':
        return NEVER_RETRIEVED not in record.getMessage() or not is_raised_by_orbax(error.__traceback__)
    return not record.pathname.endswith(THREADS)


class WithoutLateCallbacks:
    """An unraisablehook that leaves out callbacks of TensorStore to an event loop that has ended.

    Once one write of a save has failed, its event loop is closed. The other writes, which fail later, still call it
    from threads of C++, where nothing can be raised: what comes of that is printed by the hook, with frames of
    asyncio alone.
    """

    def __init__(self, hook: Any):
        self.hook = hook

    def __call__(self, given: Any) -> None:
        late = given.exc_type is RuntimeError and str(given.exc_value) == 'Event loop is closed'
        if not (late and is_of_asyncio_alone(given.exc_traceback)):
            self.hook(given)


def is_of_asyncio_alone(trace: types.TracebackType | None) -> bool:
    if trace is None:
        return False
    while trace:
        if trace.tb_frame.f_globals.get('__name__') != 'asyncio.base_events':
            return False
        trace = trace.tb_next
    return True


def is_raised_by_orbax(trace: types.TracebackType | None) -> bool:
    while trace:
        if '/orbax/' in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False
