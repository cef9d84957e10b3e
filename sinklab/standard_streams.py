"""Standard streams whose write errors cannot end a run.

Examples of such errors are a log on a full disk, a closed pipe (`2>&1 | head -1`), a closed terminal, and a closed
descriptor (`2>&-`). What a run does, saves and returns must not depend on them.
"""

import contextlib
import errno
import os
import select
import sys
from typing import Any

from sinklab.errors import format_error
from sinklab.escape import escape_control

TEXT_CONTROL_CHARS = '\t\n\r'  # control characters of ordinary text, and of lines that are overwritten
CLOSED_ERRNOS = errno.EPIPE, errno.EBADF  # the reader has closed the stream
HANGUP_ERRNOS = errno.EIO, errno.ENXIO  # for a terminal, the same; for a file, the disk has failed


class OutputClosedError(Exception):
    """Error that the reader of standard output has closed it, so that the command can stop.

    It is not derived from BrokenPipeError, because rich turns that into SystemExit(1).
    """


class SafeStream:
    """A text or binary stream whose `write` and `flush` do not raise.

    Control characters are written as visible escapes: names in files, and text from other hosts, must not move the
    cursor or set the title of a terminal. `get_unescaped_stream` is for a writer that escapes text itself. `error` is
    the first error, other than a closed stream, for the exit code.

    Args:
        stream: Stream to write to; attributes that this class does not define are those of `stream`.
        is_result: Whether the stream carries the result of a command. If so, OutputClosedError is raised when the
            reader has closed it.
    """

    def __init__(self, stream: Any, is_result: bool = False):
        self.stream, self.is_result, self.error, self._buffer = stream, is_result, None, None

    def write(self, data: Any) -> int:
        self.write_unescaped(escape_control(data, TEXT_CONTROL_CHARS) if isinstance(data, str) else data)
        return len(data)

    def write_unescaped(self, data: Any) -> int:
        self._run_safely(lambda: self.stream.write(data))
        return len(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._run_safely(self.stream.flush)

    @property
    def buffer(self) -> 'SafeStream':
        buffer = self._buffer or SafeStream(self.stream.buffer)
        buffer.is_result = self.is_result
        self._buffer = buffer
        return buffer

    def _run_safely(self, action: Any) -> None:
        try:
            action()
        except ValueError as error:  # it is closed, or cannot encode the text
            self.error = self.error or error
        except OSError as error:
            if error.errno not in CLOSED_ERRNOS and not (error.errno in HANGUP_ERRNOS and self.stream.isatty()):
                self.error = self.error or error
                return
            self._redirect_to_null()
            if self.is_result:
                raise OutputClosedError from error

    def _redirect_to_null(self) -> None:
        """Redirect buffered and later output to the null device, including output of C++ libraries."""
        with contextlib.suppress(OSError, ValueError):
            null_fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_fd, self.stream.fileno())
            os.close(null_fd)

    def final_flush(self) -> Exception | None:
        """Flush before exit, so that the interpreter reports no error; return the first error, or None."""
        with contextlib.suppress(OutputClosedError):
            self.flush()
        self.error = self.error or (self._buffer and self._buffer.error)
        if self.error:
            self._redirect_to_null()
            with contextlib.suppress(OSError, ValueError):
                self.stream.flush()
        return self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class UnescapedStream:
    """A SafeStream without escaping, for a writer that escapes text and sends control sequences itself."""

    def __init__(self, stream: SafeStream):
        self.stream, self.write = stream, stream.write_unescaped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def get_unescaped_stream(stream: Any) -> Any:
    """Return a stream that does not escape; a stream that is no SafeStream is returned unchanged."""
    return UnescapedStream(stream) if isinstance(stream, SafeStream) else stream


def open_missing_descriptors() -> None:
    """Open the null device for each closed standard descriptor, whose number a file would get otherwise."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    for name, descriptor in (('stdout', 1), ('stderr', 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, 'w', errors='backslashreplace', closefd=False))  # noqa: SIM115


def install_safe_streams() -> None:
    """Replace sys.stdout and sys.stderr by SafeStreams; call this once, at the start of the process."""
    open_missing_descriptors()
    os.environ.setdefault('PYTHON_COLORS', '0')  # otherwise Python 3.14 colors --help and tracebacks
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')  # for paths that are not UTF-8
    sys.stdout, sys.stderr = SafeStream(sys.stdout, is_result=True), SafeStream(sys.stderr)


def ignore_closed_output() -> None:
    """Continue without standard output after its reader has closed it; for commands that train."""
    if isinstance(sys.stdout, SafeStream):
        sys.stdout.is_result = False


def flush_standard_streams(exit_code: int) -> int:
    """Flush both streams at exit; return the exit code, which becomes 1 if the result was not written."""
    error = sys.stdout.final_flush()
    if error and not exit_code and sys.stdout.is_result:
        print(
            f'sinklab: standard output could not be written ({format_error(error)}); the result is lost',
            file=sys.stderr,
        )
        exit_code = 1
    sys.stderr.final_flush()
    return exit_code


def get_line_prefix() -> str:
    """Return a prefix for `write_error_from_signal`: it clears a progress bar on a terminal, or starts a new line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty() and os.environ.get('TERM', 'dumb') != 'dumb':
            return '\r\x1b[2K'
    return '\n'


def write_error_from_signal(text: str) -> None:
    """Write to the descriptor of sys.stderr, also from a signal handler; drop what cannot be written.

    A signal handler must not use the buffer of sys.stderr, because the interrupted code may be writing to it. It must
    not block either: a reader that has paused (`2>&1 | less`) would keep the process from exiting.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no sys.stderr, or one without a descriptor
        descriptor = sys.stderr.fileno()
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, text.encode())
