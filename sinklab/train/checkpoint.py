"""Checkpoints: Orbax, asynchronous, of the whole state, with the fingerprint of the data that it was trained on."""

import contextlib
import gc
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Iterator

import jax
from orbax.checkpoint import v1 as ocp

from sinklab.folder import Folder, differences
from sinklab.record import Refusal

HEALTHY = (MemoryError, PermissionError, TimeoutError, jax.errors.JaxRuntimeError)  # says nothing of a checkpoint


class Checkpoints:
    """The checkpoints of one run folder. An error of a save in the background is raised by the next call."""

    def __init__(self, folder: Folder, keep: int, data: dict[str, str | int]):
        self.folder, self.data, self.pending = folder, data, None
        self.checkpointer = self.orbax(keep)
        self.newest = self.latest()  # begun, if not yet finished

    def orbax(self, keep: int) -> ocp.training.Checkpointer:
        path = self.folder.checkpoints.absolute()
        try:
            with quiet():
                return ocp.training.Checkpointer(
                    path,
                    preservation_policy=ocp.training.preservation_policies.LatestN(keep),
                    cleanup_tmp_directories=True,
                )
        except Exception:  # it reads what all of them say of themselves, and does not say which it cannot
            for step in self.folder.checkpoint_steps():
                with self.one_line(step):
                    ocp.checkpointables_metadata(path / str(step))
            raise

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        with quiet():
            newest = self.checkpointer.latest
        return newest.step if newest else None

    def save(self, step: int, state: dict) -> None:
        self.wait()
        self.newest = step
        self.pending = self.checkpointer.save_async(step, state, custom_metadata={'data': self.data})

    def wait(self) -> None:
        """Until nothing is being written."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def drop(self, step: int) -> None:
        """Deletes a checkpoint that turns out to lead nowhere."""
        if self.newest == step:
            self.wait()
            self.checkpointer.delete(step)
            self.newest = self.latest()

    def restore(self, step: int, abstract: dict) -> dict:
        """The state of a step, each leaf where `abstract` says."""
        with self.one_line(step):
            data = dict(self.checkpointer.metadata(step).custom_metadata['data'])
            state = self.checkpointer.load(step, abstract)
        if differ := differences(data, self.data):
            raise Refusal(
                f'{self.folder} was trained on other data ({", ".join(differ)}); bring the old ones back, or give a '
                'new --workdir'
            )
        return state

    @contextlib.contextmanager
    def one_line(self, step: int) -> Iterator[None]:
        """Says in one line what Orbax says of a checkpoint in thousands of characters."""
        try:
            with quiet():
                yield
        except HEALTHY:
            raise
        except Exception as error:  # of any kind: what a damaged file raises depends on where it is damaged
            earlier = [saved for saved in self.folder.checkpoint_steps() if saved < step]
            raise Refusal(
                f'{self.folder.checkpoints / str(step)} cannot be restored (its files are damaged, or of another '
                f'version: {reason(error)}); delete it, and the same command '
                f'{f"goes on from step {earlier[-1]}" if earlier else "begins anew"}'
            ) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.checkpointer.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Orbax says beside what it raises, nor what the tasks say that it leaves behind."""
    loggers, hook = [logging.getLogger(name) for name in (None, 'absl', 'asyncio')], sys.unraisablehook

    def unraisable(given: object) -> None:
        if not of_orbax(given.exc_traceback):
            hook(given)

    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
        for logger in loggers:
            logger.addFilter(is_audible)
        sys.unraisablehook = unraisable
        try:
            yield
        except BaseException:
            gc.collect()  # the last that those tasks say
            raise
        finally:
            sys.unraisablehook = hook
            for logger in loggers:
                logger.removeFilter(is_audible)


def of_orbax(trace: types.TracebackType | None) -> bool:
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return any('orbax' in file or 'uvloop' in file for file in files)


def is_audible(record: logging.LogRecord) -> bool:
    return 'orbax' not in record.pathname and 'never retrieved' not in record.getMessage()


def reason(error: BaseException) -> str:
    """The beginning of what it all came from."""
    while error.__cause__:
        error = error.__cause__
    return f'{type(error).__name__}: {" ".join(str(error).split())[:80]}'
