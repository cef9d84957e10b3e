"""Signal handlers from the start of a process until a command installs its own.

Python raises KeyboardInterrupt on Ctrl-C wherever the main thread is. If it is importing a C extension, the import
fails with another error or crashes; a callback of the garbage collector swallows the exception. Therefore a second
thread ends the process while it is starting. When a command runs, KeyboardInterrupt is raised where it can be
handled.
"""

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

from sinklab import standard_streams

TERMINATION_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SIGINT_EXIT_CODE = 128 + signal.SIGINT
RETRY_SECONDS = 0.05  # seconds until an interrupt that was swallowed is raised again
FORCE_QUIT_SECONDS = 1.0  # seconds after the first Ctrl-C from which another one ends the process at once
STOP_MESSAGE = 'stopped at once by {name}; what was saved before is intact'


_program_name, _exit_lock = 'sinklab', _thread.allocate_lock()
_exit_function: Callable[[int], None] | None = None
_interrupted = threading.Event()  # set by the first Ctrl-C inside `enable_keyboard_interrupts`


def exit_on_signal(signum: int, frame: FrameType | None = None) -> None:
    """End this process by a signal, with one line.

    This is a Python signal handler; `_watch_wakeup_pipe` calls it as well.
    """
    if _exit_function:
        if frame is None:  # Python calls the handler as well, perhaps much later
            _exit_function(signum)
        return
    if not _exit_lock.acquire(blocking=False):
        return  # the other thread already ends the process
    standard_streams.write_error_from_signal(
        f'{_program_name}: {STOP_MESSAGE.format(name=signal.Signals(signum).name)}\n'
    )
    if signum != signal.SIGINT:
        _kill_self(signum)
    os._exit(128 + signum)


def install_signal_handlers(verb: str = '') -> None:
    """Install handlers of SIGINT, SIGTERM and SIGHUP that end this process immediately, with one line.

    They stay until other handlers are installed. A signal that is ignored stays ignored, as under nohup. SIGINT ends
    the process with code 130. The other signals kill the process, as they would without a handler, so that its parent
    sees the signal.

    Args:
        verb: Command that the line names after the program.
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


def set_exit_function(function: Callable[[int], None]) -> None:
    """Call a function, in another thread, instead of ending the process by a signal."""
    global _exit_function
    _exit_function = function


def _watch_wakeup_pipe(read_fd: int) -> None:
    """End the process on a signal, even if its main thread runs C or C++ code and no Python handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)  # other threads receive the signals
    while signums := os.read(read_fd, 1):
        if signal.getsignal(signums[0]) is exit_on_signal:  # otherwise a command handles it
            exit_on_signal(signums[0])


def _kill_self(signum: int) -> None:
    """Kill this process by a signal.

    Python sets handlers only in its main thread, so the C library resets the handler.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).signal(signum, 0)
        os.kill(os.getpid(), signum)
        time.sleep(1)


def _reset_after_fork() -> None:
    """Restore default handlers in a forked process, whose signals must not be taken for its parent's."""
    signal.set_wakeup_fd(-1)
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) is exit_on_signal:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


@contextlib.contextmanager
def enable_keyboard_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside the block.

    During an import it is raised after the import. If the exception is swallowed, it is raised again. A second
    Ctrl-C, more than FORCE_QUIT_SECONDS after the first, ends the process immediately.
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
        _interrupted.set()
        _silence_abandoned_work()
        retry_event.clear()
        if import_frame := _find_import_frame(frame):
            _raise_after_import(import_frame)
        else:
            raise KeyboardInterrupt

    retry_event = threading.Event()

    def schedule_retry() -> None:
        def resend_interrupt() -> None:
            retry_event.set()
            signal.pthread_kill(
                threading.main_thread().ident, signal.SIGINT
            )  # also wakes the main thread if it sleeps

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
            # After a signal `exit_on_signal` must not be installed again: `_watch_wakeup_pipe` may not have read yet
            # that signal, which was handled here, and would end the process.
            signal.signal(
                signal.SIGINT, exit_on_signal if first_time is None else lambda *_: os._exit(SIGINT_EXIT_CODE)
            )


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed inside `enable_keyboard_interrupts`.

    A library may catch the KeyboardInterrupt and raise another exception, as Orbax does while it reads a checkpoint.
    """
    return _interrupted.is_set()


def _silence_abandoned_work() -> None:
    """Keep asyncio from reporting event loops and coroutines that KeyboardInterrupt leaves unfinished."""
    warnings.simplefilter('ignore', RuntimeWarning)
    warnings.simplefilter('ignore', ResourceWarning)
    with contextlib.suppress(KeyError, AttributeError):  # not imported yet, or only in part
        sys.modules['logging'].getLogger('asyncio').disabled = True


def _find_import_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the outermost import statement that is being executed, or None."""
    import_frame = None
    while frame:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            import_frame = frame.f_back
        frame = frame.f_back
    return import_frame


def _raise_after_import(import_frame: FrameType) -> None:
    """Raise KeyboardInterrupt in a frame after its import, because C extensions do not survive one."""

    def raise_interrupt(frame: FrameType, event: str, argument: object) -> None:
        sys.settrace(None)
        frame.f_trace = None
        raise KeyboardInterrupt

    sys.settrace(lambda frame, event, argument: None)
    import_frame.f_trace = raise_interrupt
