"""Orbax, made quiet: what it says beside what it raises, and what it raises in one line."""

import contextlib
import gc
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

from sinklab.record import Refusal

TEMPORARY = '.orbax-checkpoint-tmp'  # in the name of what is being saved
HEALTHY = (Refusal, MemoryError, PermissionError, TimeoutError, jax.errors.JaxRuntimeError)  # nothing of the files


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


@contextlib.contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Says in one line what Orbax says of a checkpoint in thousands of characters."""
    try:
        with quiet():
            yield
    except HEALTHY:
        raise
    except Exception as error:  # of any kind: what a file raises depends on what is wrong with it
        raise Refusal(
            f'{path} cannot be read ({reason(error)}); it is of another version, or has changed since it was '
            'verified: see sinklab checkpoint verify'
        ) from error


def reason(error: BaseException) -> str:
    """The beginning of what it all came from."""
    while error.__cause__:
        error = error.__cause__
    return f'{type(error).__name__}: {" ".join(str(error).split())[:80]}'
