"""The error that users can correct, and messages: an exception on one line, a list of names, a line on stderr."""

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

MAX_ERROR_LENGTH = 200  # characters of an exception's message inside another message
MAX_LISTED_NAMES = 30  # a message does not list more allowed names


class UserError(ValueError):
    """Error that the user can correct; one line says what was given, what is allowed and what to do."""


def print_status(message: object) -> None:
    """Print a line on standard error; a log that cannot be written ends no run."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f'{message}\n')  # one write, so that parallel output cannot split the line
        sys.stderr.flush()


def format_error(error: BaseException, with_type: bool = False, max_length: int | None = MAX_ERROR_LENGTH) -> str:
    """Format an exception on one line.

    Args:
        error: The exception.
        with_type: Whether the name of its type stands before the message. If there is no message, it stands alone.
        max_length: Maximum number of characters of the message; None: no maximum.
    """
    name = type(error).__name__
    message = shorten_text(str(error), max_length)
    return f'{name}: {message}' if with_type and message else message or name


def shorten_text(text: str, max_length: int | None = MAX_ERROR_LENGTH) -> str:
    """Put a text on one line, and cut it off between words after `max_length` characters; None: do not."""
    line = ' '.join(text.split())
    start = line[:max_length]
    return line if start == line else f'{start.rpartition(" ")[0] or start} ...'


def format_names(names: list[str]) -> str:
    """Join names by commas; after the first four, give the number of the others."""
    return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


def format_extra_command(extra: str) -> str:
    """Return the command that installs an extra of sinklab, such as `hf`, in this environment, from the clone."""
    uv = Path(sys.executable).with_name('uv')  # of an environment that `make` has made, which has no pip
    installer = f'{os.path.relpath(uv)} pip' if uv.exists() else f'{sys.executable} -m pip'
    return f"{installer} install -e '.[{extra}]'"


def raise_errors(errors: Iterable[str]) -> None:
    """Raise one UserError with all errors in one line; do nothing if there are none."""
    distinct = list(dict.fromkeys(errors))
    if len(distinct) > 1:
        numbered = '; '.join(f'({number}) {error}' for number, error in enumerate(distinct, 1))
        raise UserError(f'{len(distinct)} faults: {numbered}')
    if distinct:
        raise UserError(distinct[0])


def format_unknown_name(
    subject: str, name: str, allowed: Iterable[str], label: str = 'fields', suggestion: str | None = None
) -> str:
    """Format the message about an unknown name, with the closest allowed name and the allowed names.

    Of more than MAX_LISTED_NAMES allowed names, it lists only the three most similar ones.

    Args:
        subject: What is unknown, as the message begins.
        name: The unknown name.
        allowed: The allowed names.
        label: Label of the allowed names.
        suggestion: The name to suggest; None: the closest one in `allowed`.
    """
    listed = allowed = list(allowed)
    if len(allowed) > MAX_LISTED_NAMES:
        listed = [*(difflib.get_close_matches(name, allowed, 3, cutoff=0.3) or allowed[:3]), '...']
    suggestion = suggestion or next(iter(difflib.get_close_matches(name, allowed, 1)), None)
    question = f'; did you mean {suggestion}?' if suggestion else ''
    return f'{subject} is unknown{question} ({label}: {", ".join(listed)})'
