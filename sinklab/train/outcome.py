"""How an attempt at a run has ended: outcome.json in its folder, for a sweep, a scheduler or a person to read."""

import contextlib
import math
import signal
import traceback
from collections.abc import Iterator

from sinklab.checkpoint import digests
from sinklab.files.denied import describe_path_error, is_permanent_error
from sinklab.files.patience import AccessDeniedError, BucketNotFoundError, StorageTimeoutError
from sinklab.files.regular import DamagedFileError
from sinklab.folder import RunDir
from sinklab.lease import LeaseLostError
from sinklab.processes.ending import CAUSE_BY_SIGNAL, ExitStatus, make_immediate_stop
from sinklab.record import UserError


class DivergedError(ArithmeticError):
    """The loss, its gradient, or what was measured is no longer finite."""

    def __init__(self, step: int, metrics: dict[str, float]):
        non_finite = ', '.join(f'{name} is {value}' for name, value in metrics.items() if not math.isfinite(value))
        super().__init__(f'{non_finite} at step {step}')
        self.step = step


class StoppedBySignal(Exception):
    """A signal asked for the end, and the state is saved."""

    def __init__(self, signal_number: int, step: int):
        super().__init__(f'saved at step {step}')
        self.signal, self.step = signal.Signals(signal_number), step


class ReplicaMismatchError(RuntimeError):
    """Processes have come to different numbers where they must be the same."""

    def __init__(self, step: int, mismatch: str):
        super().__init__(f'{mismatch}, at step {step}; the run goes on from the checkpoint before it')
        self.step = step


@contextlib.contextmanager
def write_outcome(run_dir: RunDir) -> Iterator[None]:
    """Writes how what is done inside ends, in the place of how it ended before; only into the folder of a run."""
    error = None
    run_dir.delete_json('outcome')
    try:
        yield
    except BaseException as raised_error:
        error = raised_error
        raise
    finally:
        if not isinstance(error, LeaseLostError):
            with contextlib.suppress(OSError, DamagedFileError):  # the disk, or a file, may be what has ended it
                if run_dir.has_run():
                    run_dir.write_json('outcome', make_outcome(run_dir, error))


def make_outcome(run_dir: RunDir, error: BaseException | None) -> dict[str, str | int | None]:
    """What outcome.json holds; the checkpoint is the newest whole one."""
    exit_status = classify_error(error) if error else ExitStatus('done')
    has_step = isinstance(error, DivergedError | StoppedBySignal)
    return dict(
        kind=exit_status.kind,
        step=error.step if has_step else next((metrics_record['step'] for metrics_record in reversed(run_dir.read_metric_lines())), 0),
        checkpoint=digests.find_newest_step(run_dir),
        message=' '.join(exit_status.words.split()),
        exit_code=exit_status.exit_code,
    )


def classify_error(error: BaseException) -> ExitStatus:
    """How what is raised ends a process: by what was asked of it, by all of them, by its machine, or by its code."""
    match error:
        case UserError():
            return ExitStatus('refused', str(error))
        case DivergedError():
            return ExitStatus('diverged', str(error), orderly=True)
        case ReplicaMismatchError():
            return ExitStatus('disagreed', str(error), orderly=True)
        case StoppedBySignal():
            return ExitStatus(CAUSE_BY_SIGNAL[error.signal], str(error), orderly=True)
        case AccessDeniedError() | BucketNotFoundError():
            return ExitStatus('refused', error.strerror)
        case StorageTimeoutError():
            return ExitStatus('storage', error.strerror)
        case OSError() if is_permanent_error(error):
            return ExitStatus('refused', f'{describe_path_error(error)}; change that, or give another path')
        case KeyboardInterrupt():
            return make_immediate_stop(signal.SIGINT)
    from jax.errors import JaxRuntimeError

    causes = {JaxRuntimeError: 'runtime', OSError: 'storage'}
    cause = next((cause for error_type, cause in causes.items() if isinstance(error, error_type)), 'crashed')
    message = ' '.join(traceback.format_exception_only(error)[-1].split())
    return ExitStatus(cause, message, ''.join(traceback.format_exception(error)))
