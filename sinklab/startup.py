"""Signals from the first line of a process until a verb handles them itself.

Python turns Ctrl-C into a KeyboardInterrupt wherever the main thread is: in the import of a C extension, which then
fails in other words or crashes, or in a callback of the garbage collector, which swallows it. Here a second thread
ends the process while it is starting. Once a verb runs, KeyboardInterrupt is raised where it can be handled.
"""

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from sinklab import streams

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
INTERRUPTED = 128 + signal.SIGINT
RETRY = 0.05  # seconds until an interrupt is raised again that could not be handled where it came
IMPATIENT = 1.0  # seconds after the first Ctrl-C from which another one ends the process at once
LINE = 'stopped at once by {name}; what was saved before is intact'


_name, _ending = 'sinklab', _thread.allocate_lock()


def end_at_once(number: int, frame: FrameType | None = None) -> None:
    """End this process by a signal, with one line. A handler of Python, which `_watch` calls as well."""
    if not _ending.acquire(blocking=False):
        return  # the other thread is at it
    streams.write_error(f'{_name}: {LINE.format(name=signal.Signals(number).name)}\n')
    if number != signal.SIGINT:
        _die_of(number)
    os._exit(128 + number)


def install(verb: str = '') -> None:
    """Have SIGINT, SIGTERM and SIGHUP end this process at once, with one line, until other handlers are installed.

    A signal that is ignored stays so, as under nohup. SIGINT ends the process with code 130. The process dies of the
    other signals, as it would without a handler, and its parent sees that.

    Args:
        verb: what the line names beside the program.
    """
    global _name
    _name = f'sinklab {verb}'.strip()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end_at_once)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _thread.start_new_thread(_watch, (reader,))
    os.register_at_fork(after_in_child=_reset)
    unblock()


def _watch(reader: int) -> None:
    """End the process while its main thread is busy in C or C++, where no handler of Python runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # or one that came between `block` and the new program were lost
    while numbers := os.read(reader, 1):
        if signal.getsignal(numbers[0]) is end_at_once:  # else a verb handles it
            end_at_once(numbers[0])


def _die_of(number: int) -> None:
    """End this process by a signal. Python sets handlers in its main thread alone, so the C library is asked."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).signal(number, 0)
        os.kill(os.getpid(), number)
        time.sleep(1)


def _reset() -> None:
    """Give a forked process default handlers: a signal to it is none to its parent."""
    signal.set_wakeup_fd(-1)
    for number in ENDING:
        if signal.getsignal(number) is end_at_once:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def block() -> None:
    """Hold signals back while this process replaces its program; `install` lets them through again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def unblock() -> None:
    """Let through what `block` has held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, after an import that the main thread is in, again if it is swallowed.

    A second Ctrl-C, a second after the first or later, ends the process at once.
    """
    if signal.getsignal(signal.SIGINT) is not end_at_once:
        yield
        return
    first, hook = None, sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first > IMPATIENT and not retrying.is_set():
            os._exit(INTERRUPTED)
        first = first or time.monotonic()
        retrying.clear()
        if importer := _find_importer(frame):
            _raise_after_import(importer)
        else:
            raise KeyboardInterrupt

    retrying = threading.Event()

    def retry() -> None:
        def again() -> None:
            retrying.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # wakes it, too, if it sleeps

        timer = threading.Timer(RETRY, again)
        timer.daemon = True
        timer.start()

    def report_unraisable(unraisable: 'sys.UnraisableHookArgs') -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            retry()
        else:
            hook(unraisable)

    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if signal.getsignal(signal.SIGINT) is interrupt:
            # `_watch` may not have read yet that a signal came which was handled here.
            signal.signal(signal.SIGINT, end_at_once if first is None else lambda *_: os._exit(INTERRUPTED))


def _find_importer(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the outermost import statement that is under way, or None."""
    importer = None
    while frame:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            importer = frame.f_back
        frame = frame.f_back
    return importer


def _raise_after_import(importer: FrameType) -> None:
    """Raise KeyboardInterrupt in a frame once its import statement has ended: C extensions do not survive one."""

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        sys.settrace(None)
        frame.f_trace = None
        raise KeyboardInterrupt

    sys.settrace(lambda frame, event, argument: None)
    importer.f_trace = interrupt
