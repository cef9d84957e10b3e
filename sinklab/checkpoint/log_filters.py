"""Filters for what Orbax and TensorStore log and print beside the errors that they raise.

Loggers and `sys.unraisablehook` belong to the whole process. One filter and one hook are installed and stay; inside
`suppress_orbax_logs` they let less through. They are never removed: another thread or library may have installed its
own meanwhile.
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

ORBAX_PATH_PART = '/orbax/'  # in the paths of its files
LOGGER_NAMES = None, 'absl', 'asyncio'
# Orbax keeps what a thread of its has raised, raises it again where the save is waited for, and logs it besides with
# a traceback, once for each thread that waits for the first: 3 to 9 of them, 280 lines, around one line of ours.
ORBAX_FUTURE_FILE = 'orbax/checkpoint/_src/futures/future.py'
NEVER_RETRIEVED_TEXT = 'never retrieved'  # of what asyncio says of a task that was waited for with others
NEVER_AWAITED_PATTERN = 'coroutine .* was never awaited'


class OrbaxLogSuppressor:
    """Counter of the threads inside `suppress_orbax_logs`; a warning is ignored while there is one."""

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
                with contextlib.suppress(ValueError):  # what other threads have added meanwhile stays
                    warnings.filters.remove(self.warning_filter)


SUPPRESSOR, INSTALL_LOCK = OrbaxLogSuppressor(), threading.Lock()


@contextlib.contextmanager
def suppress_orbax_logs() -> Iterator[None]:
    """Let nothing be heard of what Orbax says beside what it raises, nor of the tasks that it leaves behind."""
    SUPPRESSOR.enter()
    try:
        yield
    except BaseException:
        gc.collect()  # the last that those tasks say
        raise
    finally:
        SUPPRESSOR.leave()


def install_filters() -> None:
    """Install the filter and the hook, unless they are there."""
    import absl.logging  # noqa: F401  makes the logger `absl` of its own class, which getLogger alone would not

    with INSTALL_LOCK:
        for name in LOGGER_NAMES:
            logging.getLogger(name).addFilter(is_logged)  # which adds the same filter no second time
        if not isinstance(sys.unraisablehook, UnraisableHook):
            sys.unraisablehook = UnraisableHook(sys.unraisablehook)


def is_logged(record: logging.LogRecord) -> bool:
    """Return whether to log a record: all but errors of storage that a thread or task of Orbax has raised.

    Inside of `suppress_orbax_logs`, nothing of Orbax is.
    """
    never_retrieved = NEVER_RETRIEVED_TEXT in str(record.msg)  # the message of asyncio has no arguments
    if SUPPRESSOR.num_threads and (never_retrieved or ORBAX_PATH_PART in record.pathname):
        return False
    error = record.exc_info[1] if record.exc_info else None
    # ValueError is what Orbax makes of an error of TensorStore.
    if record.name not in LOGGER_NAMES or not isinstance(error, OSError | ValueError):
        return True
    if record.name == 'asyncio':
        return not (never_retrieved and is_raised_in(error.__traceback__, ORBAX_PATH_PART))
    return not record.pathname.endswith(ORBAX_FUTURE_FILE)


class UnraisableHook:
    """A sys.unraisablehook that passes on what is no consequence of an error that Orbax raises.

    It calls the hook that it has found, and that one alone for as long as it lives: hooks that call each other cannot
    come to be a circle, whoever puts which of them back.
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self.hook = hook

    def __call__(self, unraisable: Any) -> None:
        is_suppressed = (
            SUPPRESSOR.num_threads and is_raised_in(unraisable.exc_traceback, ORBAX_PATH_PART, 'uvloop')
        ) or is_late_callback(unraisable)
        if not (
            is_suppressed and issubclass(unraisable.exc_type, Exception)
        ):  # KeyboardInterrupt is to be heard everywhere
            self.hook(unraisable)


def is_late_callback(unraisable: Any) -> bool:
    """Return whether TensorStore has called an event loop that has ended.

    Once one write of a save has failed, its event loop is closed. The other writes, which fail later, still call it
    from threads of C++, where nothing can be raised: what comes of that has frames of asyncio alone.
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
