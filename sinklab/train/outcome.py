"""How an attempt at a run has ended: outcome.json in its folder, for a sweep, a scheduler or a person to read."""

import contextlib
import math
import signal
import traceback
from collections.abc import Iterator

from sinklab.checkpoint import digests
from sinklab.files.denied import describe, is_permanent
from sinklab.files.patience import Denied, NoBucket, Unanswered
from sinklab.files.regular import Damaged
from sinklab.folder import Folder
from sinklab.lease import Superseded
from sinklab.processes.ending import OF_SIGNAL, End, at_once
from sinklab.record import Refusal


class Diverged(ArithmeticError):
    """The loss, its gradient, or what was measured is no longer finite."""

    def __init__(self, step: int, numbers: dict[str, float]):
        wild = ', '.join(f'{name} is {value}' for name, value in numbers.items() if not math.isfinite(value))
        super().__init__(f'{wild} at step {step}')
        self.step = step


class Stopped(Exception):
    """A signal asked for the end, and the state is saved."""

    def __init__(self, number: int, step: int):
        super().__init__(f'saved at step {step}')
        self.signal, self.step = signal.Signals(number), step


class Disagreement(RuntimeError):
    """Processes have come to different numbers where they must be the same."""

    def __init__(self, step: int, difference: str):
        super().__init__(f'{difference}, at step {step}; the run goes on from the checkpoint before it')
        self.step = step


@contextlib.contextmanager
def outcome(folder: Folder) -> Iterator[None]:
    """Writes how what is done inside ends, in the place of how it ended before; only into the folder of a run."""
    error = None
    folder.forget('outcome')
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if not isinstance(error, Superseded):
            with contextlib.suppress(OSError, Damaged):  # the disk, or a file, may be what has ended it
                if folder.is_claimed():
                    folder.write('outcome', record(folder, error))


def record(folder: Folder, error: BaseException | None) -> dict[str, str | int | None]:
    """What outcome.json holds; the checkpoint is the newest whole one."""
    end = of_error(error) if error else End('done')
    known = isinstance(error, Diverged | Stopped)
    return dict(
        kind=end.kind,
        step=error.step if known else next((line['step'] for line in reversed(folder.lines())), 0),
        checkpoint=digests.newest(folder),
        message=' '.join(end.words.split()),
        exit_code=end.code,
    )


def of_error(error: BaseException) -> End:
    """How what is raised ends a process: by what was asked of it, by all of them, by its machine, or by its code."""
    match error:
        case Refusal():
            return End('refused', str(error))
        case Diverged():
            return End('diverged', str(error), orderly=True)
        case Disagreement():
            return End('disagreed', str(error), orderly=True)
        case Stopped():
            return End(OF_SIGNAL[error.signal], str(error), orderly=True)
        case Denied() | NoBucket():
            return End('refused', error.strerror)
        case Unanswered():
            return End('storage', error.strerror)
        case OSError() if is_permanent(error):
            return End('refused', f'{describe(error)}; change that, or give another path')
        case KeyboardInterrupt():
            return at_once(signal.SIGINT)
    from jax.errors import JaxRuntimeError

    causes = {JaxRuntimeError: 'runtime', OSError: 'storage'}
    cause = next((cause for kind, cause in causes.items() if isinstance(error, kind)), 'crashed')
    words = ' '.join(traceback.format_exception_only(error)[-1].split())
    return End(cause, words, ''.join(traceback.format_exception(error)))
