"""Standard streams whose write errors cannot end a run.

Examples are a log on a full disk, a reader that has gone (`2>&1 | head -1`), a closed terminal, a closed
descriptor (`2>&-`). What a run does, saves and returns must not depend on them.
"""

import contextlib
import errno
import os
import select
import sys
from typing import Any

from sinklab.escape import escape_control

TEXT_CONTROL_CHARS = '\t\n\r'  # control characters that text consists of, and lines that are written over and over
CLOSED_ERRNOS = errno.EPIPE, errno.EBADF  # nobody reads this stream any more
HANGUP_ERRNOS = errno.EIO, errno.ENXIO  # the same of a terminal; of a file, the disk has failed


class OutputClosedError(Exception):
    """The reader of standard output has gone, so that there is nobody to go on for.

    It is no BrokenPipeError: rich would turn that into SystemExit(1).
    """


class SafeStream:
    """A text or binary stream whose `write` and `flush` do not raise.

    Control characters are written as visible escapes: names in files, and what other hosts say, must not move the
    cursor or set the title of a terminal. `get_unescaped_stream` is for a writer that does without.

    Args:
        stream: what is written to; everything but `write`, `flush` and `buffer` is its own.
        is_result: whether it carries the result of a command. Then OutputClosedError is raised once its reader has
            gone, and `error` keeps the first other error, for the exit code.
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
        """Send what is buffered, and all that follows, to the null device, also what C++ libraries write."""
        with contextlib.suppress(OSError, ValueError):
            null_fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_fd, self.stream.fileno())
            os.close(null_fd)

    def final_flush(self) -> Exception | None:
        """Flush for the last time, so that the interpreter has nothing to report; return the first error."""
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
    """The same stream for a writer that escapes text by itself, and sends sequences of its own to a terminal."""

    def __init__(self, stream: SafeStream):
        self.stream, self.write = stream, stream.write_unescaped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def get_unescaped_stream(stream: Any) -> Any:
    """Return a stream that writes control characters as they are; one that is not made safe is returned itself."""
    return UnescapedStream(stream) if isinstance(stream, SafeStream) else stream


def open_missing_descriptors() -> None:
    """Open the null device for each standard descriptor that is closed, or the next file would take its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name, descriptor in (('stdout', 1), ('stderr', 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, 'w', errors='backslashreplace', closefd=False))  # noqa: SIM115


def install_safe_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that cannot end a run. To be called once, at the start."""
    open_missing_descriptors()
    os.environ.setdefault('PYTHON_COLORS', '0')  # or Python 3.14 would colour --help and tracebacks
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')  # of a path that is not UTF-8
    sys.stdout, sys.stderr = SafeStream(sys.stdout, is_result=True), SafeStream(sys.stderr)


def ignore_closed_output() -> None:
    """Go on without standard output once its reader has gone: for verbs that train."""
    if isinstance(sys.stdout, SafeStream):
        sys.stdout.is_result = False


def flush_standard_streams(exit_code: int) -> int:
    """Flush both streams at the end of a process, and return its exit code: 1 if its result could not be written."""
    error = sys.stdout.final_flush()
    if error and not exit_code and sys.stdout.is_result:
        print(f'sinklab: standard output could not be written ({error}); the result is lost', file=sys.stderr)
        exit_code = 1
    sys.stderr.final_flush()
    return exit_code


def get_line_prefix() -> str:
    """Return what comes before a line for `write_error`: it takes the place of a live bar, and else follows it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty() and os.environ.get('TERM', 'dumb') != 'dumb':
            return '\r\x1b[2K'
    return '\n'


def write_error(text: str) -> None:
    """Write to the descriptor of sys.stderr, also from a signal handler; drop what cannot be written.

    A signal handler must not use the buffer of sys.stderr, which the interrupted code may be writing to. It must not
    wait, either: a reader that has stopped (`2>&1 | less`) would keep the process from ending.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none, or it has no descriptor
        descriptor = sys.stderr.fileno()
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, text.encode())
