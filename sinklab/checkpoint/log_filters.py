"""Filters for messages that Orbax and TensorStore log or print in addition to raising errors.

Loggers and `sys.unraisablehook` belong to the whole process. One filter and one hook are installed and stay
installed, because another thread or library may have installed its own in the meantime. Inside `suppress_orbax_logs`
they suppress more.
"""

import contextlib
import gc
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

ORBAX_PATH_PART = '/orbax/'  # in the paths of Orbax's source files
LOGGER_NAMES = None, 'absl', 'asyncio'
# Orbax stores an error of one of its threads, and raises it again where the save is awaited. It also logs the error
# with a traceback, once for each thread that waits for the first: 3 to 9 of them, 280 lines, around one line of ours.
ORBAX_FUTURE_FILE = 'orbax/checkpoint/_src/futures/future.py'
NEVER_RETRIEVED_TEXT = 'never retrieved'  # in asyncio's message about a task that was awaited with others
NEVER_AWAITED_PATTERN = 'coroutine .* was never awaited'


class OrbaxLogSuppressor:
    """Counter of threads inside `suppress_orbax_logs`; while there is one, a warning is ignored."""

    def __init__(self) -> None:
        self.lock, self.num_threads, self.warning_filter = threading.Lock(), 0, None

    def enter(self) -> None:
        install_filters()
        with self.lock:
            self.num_threads += 1
            if self.num_threads == 1:
                previous_filters = list(warnings.filters)
                warnings.filterwarnings('ignore', NEVER_AWAITED_PATTERN, RuntimeWarning)
                self.warning_filter = None if warnings.filters[0] in previous_filters else warnings.filters[0]

    def leave(self) -> None:
        with self.lock:
            self.num_threads -= 1
            if not self.num_threads:
                with contextlib.suppress(ValueError):  # filters that other threads have added in the meantime stay
                    warnings.filters.remove(self.warning_filter)


SUPPRESSOR, INSTALL_LOCK = OrbaxLogSuppressor(), threading.Lock()


@contextlib.contextmanager
def suppress_orbax_logs() -> Iterator[None]:
    """Suppress logs of Orbax, and messages of tasks that it leaves behind, inside the block."""
    SUPPRESSOR.enter()
    try:
        yield
    except BaseException:
        gc.collect()  # the last messages of those tasks appear now, while they are suppressed
        raise
    finally:
        SUPPRESSOR.leave()


def install_filters() -> None:
    """Install the filter and the hook, unless they are installed."""
    import absl.logging  # noqa: F401  creates the logger `absl` with its own class, as getLogger would not

    with INSTALL_LOCK:
        for name in LOGGER_NAMES:
            logging.getLogger(name).addFilter(is_logged)  # it adds the same filter only once
        if not isinstance(sys.unraisablehook, UnraisableHook):
            sys.unraisablehook = UnraisableHook(sys.unraisablehook)


def is_logged(record: logging.LogRecord) -> bool:
    """Return whether to log a record; storage errors that threads or tasks of Orbax raise are not logged.

    Inside `suppress_orbax_logs`, no record of Orbax is logged.
    """
    never_retrieved = NEVER_RETRIEVED_TEXT in str(record.msg)  # the message of asyncio has no arguments
    if SUPPRESSOR.num_threads and (never_retrieved or ORBAX_PATH_PART in record.pathname):
        return False
    error = record.exc_info[1] if record.exc_info else None
    # Orbax raises errors of TensorStore as ValueError.
    if record.name not in LOGGER_NAMES or not isinstance(error, OSError | ValueError):
        return True
    if record.name == 'asyncio':
        return not (never_retrieved and is_raised_in(error.__traceback__, ORBAX_PATH_PART))
    return not record.pathname.endswith(ORBAX_FUTURE_FILE)


class UnraisableHook:
    """A `sys.unraisablehook` that drops consequences of errors that Orbax raises itself.

    It passes everything else to the hook that was installed before it, and never to another one. So hooks that call
    each other cannot form a cycle, whichever of them is restored.
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self.hook = hook

    def __call__(self, unraisable: Any) -> None:
        is_suppressed = (
            SUPPRESSOR.num_threads and is_raised_in(unraisable.exc_traceback, ORBAX_PATH_PART, 'uvloop')
        ) or is_late_callback(unraisable)
        if not (
            is_suppressed and issubclass(unraisable.exc_type, Exception)
        ):  # KeyboardInterrupt is never suppressed
            self.hook(unraisable)


def is_late_callback(unraisable: Any) -> bool:
    """Return whether an error comes from TensorStore, which has called a closed event loop.

    When one write of a save fails, its event loop is closed. The other writes, which fail later, still call the loop
    from C++ threads, where nothing can be raised. The traceback of such an error has only frames of asyncio.
    """
    if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != 'Event loop is closed':
        return False
    modules = [frame.f_globals.get('__name__') for frame in iterate_frames(unraisable.exc_traceback)]
    return bool(modules) and all(module == 'asyncio.base_events' for module in modules)


def is_raised_in(trace: types.TracebackType | None, *parts: str) -> bool:
    """Return whether a frame of a traceback is of a file with one of these parts in its path."""
    return any(part in frame.f_code.co_filename for frame in iterate_frames(trace) for part in parts)


def iterate_frames(trace: types.TracebackType | None) -> Iterator[types.FrameType]:
    while trace:
        yield trace.tb_frame
        trace = trace.tb_next
