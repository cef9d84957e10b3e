"""Signal handlers from the start of a process until a command installs its own.

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

from sinklab import standard_streams

TERMINATION_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SIGINT_EXIT_CODE = 128 + signal.SIGINT
RETRY_SECONDS = 0.05  # seconds until an interrupt is raised again that could not be handled where it came
FORCE_QUIT_SECONDS = 1.0  # seconds after the first Ctrl-C from which another one ends the process at once
STOP_MESSAGE = 'stopped at once by {name}; what was saved before is intact'


_program_name, _exit_lock = 'sinklab', _thread.allocate_lock()


def exit_on_signal(signum: int, frame: FrameType | None = None) -> None:
    """End this process by a signal, with one line. A handler of Python, which `_watch_wakeup_pipe` calls as well."""
    if not _exit_lock.acquire(blocking=False):
        return  # the other thread is at it
    standard_streams.write_error(f'{_program_name}: {STOP_MESSAGE.format(name=signal.Signals(signum).name)}\n')
    if signum != signal.SIGINT:
        _kill_self(signum)
    os._exit(128 + signum)


def install_signal_handlers(verb: str = '') -> None:
    """Have SIGINT, SIGTERM and SIGHUP end this process at once, with one line, until other handlers are installed.

    A signal that is ignored stays so, as under nohup. SIGINT ends the process with code 130. The process dies of the
    other signals, as it would without a handler, and its parent sees that.

    Args:
        verb: what the line names beside the program.
    """
    global _program_name
    _program_name = f'sinklab {verb}'.strip()
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, exit_on_signal)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    _thread.start_new_thread(_watch_wakeup_pipe, (read_fd,))
    os.register_at_fork(after_in_child=_reset_after_fork)
    unblock_signals()


def _watch_wakeup_pipe(read_fd: int) -> None:
    """End the process while its main thread is busy in C or C++, where no handler of Python runs."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, TERMINATION_SIGNALS
    )  # or one that came between `block_signals` and the new program were lost
    while signums := os.read(read_fd, 1):
        if signal.getsignal(signums[0]) is exit_on_signal:  # else a verb handles it
            exit_on_signal(signums[0])


def _kill_self(signum: int) -> None:
    """End this process by a signal. Python sets handlers in its main thread alone, so the C library is asked."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).signal(signum, 0)
        os.kill(os.getpid(), signum)
        time.sleep(1)


def _reset_after_fork() -> None:
    """Give a forked process default handlers: a signal to it is none to its parent."""
    signal.set_wakeup_fd(-1)
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) is exit_on_signal:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def block_signals() -> None:
    """Block signals while this process replaces its program; `install_signal_handlers` unblocks them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)


def unblock_signals() -> None:
    """Let through what `block_signals` has held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS)


@contextlib.contextmanager
def enable_keyboard_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, after an import that the main thread is in, again if it is swallowed.

    A second Ctrl-C, a second after the first or later, ends the process at once.
    """
    if signal.getsignal(signal.SIGINT) is not exit_on_signal:
        yield
        return
    first_time, previous_hook = None, sys.unraisablehook

    def handle_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if first_time is not None and time.monotonic() - first_time > FORCE_QUIT_SECONDS and not retry_event.is_set():
            os._exit(SIGINT_EXIT_CODE)
        first_time = first_time or time.monotonic()
        retry_event.clear()
        if import_frame := _find_import_frame(frame):
            _raise_after_import(import_frame)
        else:
            raise KeyboardInterrupt

    retry_event = threading.Event()

    def schedule_retry() -> None:
        def resend_interrupt() -> None:
            retry_event.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # wakes it, too, if it sleeps

        timer = threading.Timer(RETRY_SECONDS, resend_interrupt)
        timer.daemon = True
        timer.start()

    def report_unraisable(unraisable: 'sys.UnraisableHookArgs') -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            schedule_retry()
        else:
            previous_hook(unraisable)

    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        if signal.getsignal(signal.SIGINT) is handle_interrupt:
            # `_watch_wakeup_pipe` may not have read yet that a signal came which was handled here.
            signal.signal(
                signal.SIGINT, exit_on_signal if first_time is None else lambda *_: os._exit(SIGINT_EXIT_CODE)
            )


def _find_import_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the outermost import statement that is under way, or None."""
    import_frame = None
    while frame:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            import_frame = frame.f_back
        frame = frame.f_back
    return import_frame


def _raise_after_import(import_frame: FrameType) -> None:
    """Raise KeyboardInterrupt in a frame once its import statement has ended: C extensions do not survive one."""

    def raise_interrupt(frame: FrameType, event: str, argument: object) -> None:
        sys.settrace(None)
        frame.f_trace = None
        raise KeyboardInterrupt

    sys.settrace(lambda frame, event, argument: None)
    import_frame.f_trace = raise_interrupt
