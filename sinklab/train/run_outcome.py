"""Exceptions that end a run, stop signals, and outcome.json."""

import contextlib
import errno
import math
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from types import FrameType

from sinklab.checkpoint import digests
from sinklab.errors import UserError, format_error
from sinklab.exit_status import ExitStatus, handle_stop_signals
from sinklab.run_dir import RunDir
from sinklab.storage.files import DamagedFileError
from sinklab.storage.folder_lock import FolderTakenError

# A full disk, a missing permission, or a file of another kind: the same command meets the same error.
PERMANENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
SAME_SIGNAL_SECONDS = 1.0  # seconds within which a terminal, a scheduler and a sweep send the same signal
BUCKET_PACKAGES = 'gcsfs', 'aiohttp', 'google', 'requests'  # whose errors have no common base class


class DivergedError(ArithmeticError):
    """The loss, its gradient, or a metric is no longer finite."""

    def __init__(self, step: int, metrics: dict[str, float]):
        non_finite = ', '.join(f'{name} is {value}' for name, value in metrics.items() if not math.isfinite(value))
        super().__init__(f'{non_finite} at step {step}')
        self.step = step


class StoppedBySignal(Exception):
    """A signal requested a stop, and the state is saved."""

    def __init__(self, signal_number: int, step: int):
        super().__init__(f'saved at step {step}')
        self.signal = signal.Signals(signal_number)
        self.step = step


@contextlib.contextmanager
def write_outcome(run_dir: RunDir) -> Iterator[None]:
    """Write outcome.json when the block ends, if the directory holds a run."""
    error = None
    run_dir.delete_json('outcome')
    try:
        yield
    except BaseException as raised_error:
        error = raised_error
        if isinstance(error, OSError) and error.errno:  # errors of gcsfs have none, and name the object in their text
            error.filename = error.filename or str(run_dir)
        raise
    finally:
        if not isinstance(error, FolderTakenError):
            with contextlib.suppress(OSError, DamagedFileError):  # the disk or a file may be the cause of the error
                if run_dir.has_run():
                    run_dir.write_json('outcome', make_outcome(run_dir, error))


def make_outcome(run_dir: RunDir, error: BaseException | None) -> dict[str, str | int | None]:
    """Return the content of outcome.json; its checkpoint is the newest valid one."""
    exit_status = classify_error(error) if error else ExitStatus('done')
    if isinstance(error, DivergedError | StoppedBySignal):
        step = error.step
    else:
        step = next((record['step'] for record in reversed(run_dir.read_metric_lines())), 0)
    return dict(
        kind=exit_status.kind,
        step=step,
        checkpoint=digests.find_newest_step(run_dir),
        message=' '.join(exit_status.message.split()),
        exit_code=exit_status.exit_code,
    )


def classify_error(error: BaseException) -> ExitStatus:
    """Return the exit status of an error, by whether the user, the run, the machine or the code caused it."""
    message = format_error(error, with_type=True, max_length=None)  # without the notes that jax adds
    trace = ''.join(traceback.format_exception(error))
    match error:
        case UserError():
            return ExitStatus('refused', str(error))
        case DivergedError():
            return ExitStatus('diverged', str(error))
        case StoppedBySignal():
            return ExitStatus('stopped', str(error), signal_number=error.signal)
        case _ if is_permanent_error(error):
            return ExitStatus(
                'refused', f'{describe_storage_error(error)}; change that, and run the same command again'
            )
        case FileNotFoundError():  # it may be an error in the code
            return ExitStatus('lost', message, trace)
        case _ if is_storage_error(error):
            return ExitStatus('lost', describe_storage_error(error))
        case KeyboardInterrupt():
            intact = 'stopped at once; what was saved before is intact'
            return ExitStatus('stopped', intact, signal_number=signal.SIGINT)
    from jax.errors import JaxRuntimeError

    return ExitStatus('lost' if isinstance(error, JaxRuntimeError) else 'crashed', message, trace)


def is_storage_error(error: BaseException) -> bool:
    """Return whether an error is one of a disk or of a bucket."""
    return isinstance(error, OSError) or type(error).__module__.partition('.')[0] in BUCKET_PACKAGES


def is_permanent_error(error: BaseException) -> bool:
    """Return whether a storage error would occur again after a restart."""
    return is_storage_error(error) and (
        getattr(error, 'errno', None) in PERMANENT_ERRNOS
        or str(getattr(error, 'code', '')) in ('401', '403', '404')
        # gcsfs raises OSError('Forbidden: ...') for status 403, and google.auth a class of its own.
        or str(error).startswith('Forbidden')
        or type(error).__name__ == 'DefaultCredentialsError'
    )


def describe_storage_error(error: BaseException) -> str:
    """Describe a storage error in one line: its path, if it names one, and its reason."""
    path = getattr(error, 'filename2', None) or getattr(error, 'filename', None)
    reason = getattr(error, 'strerror', None) or format_error(error, with_type=True)
    return f'{path or "the storage"} cannot be used ({reason})'


@contextlib.contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT, SIGTERM or SIGHUP in a list, so that a step can end before the run stops.

    SIGHUP counts as SIGTERM, unless it is ignored, as under nohup. A terminal, a sweep and a scheduler may each pass
    on the same signal, so that it counts once within a second. A later signal ends the process at once.
    """
    received: list[int] = []
    first_time = 0.0

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if not received:
            first_time = time.monotonic()
            received.append(signal.SIGTERM if signal_number == signal.SIGHUP else signal_number)
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the signal came during another print
                print('stopping after this step; send the signal again to stop at once', file=sys.stderr, flush=True)
        elif time.monotonic() - first_time > SAME_SIGNAL_SECONDS:
            if signal_number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(signal_number, signal.SIG_DFL)
            signal.raise_signal(signal_number)

    with handle_stop_signals(handle_signal):
        yield received
