"""The error that users can correct, and texts for messages: an exception on one line, a list of names."""

MAX_ERROR_LENGTH = 200  # characters of an exception's message inside another message


class UserError(ValueError):
    """Error that the user can correct; one line says what was given, what is allowed and what to do."""


def format_error(error: BaseException, with_type: bool = False, max_length: int | None = MAX_ERROR_LENGTH) -> str:
    """Format an exception on one line.

    Args:
        error: The exception.
        with_type: Whether the name of its type stands before the message. If there is no message, it stands alone.
        max_length: Maximum number of characters of the message; None: no maximum.
    """
    name, message = type(error).__name__, shorten_text(str(error), max_length)
    return f'{name}: {message}' if with_type and message else message or name


def shorten_text(text: str, max_length: int | None = MAX_ERROR_LENGTH) -> str:
    """Put a text on one line, and cut it off after `max_length` characters; None: do not."""
    return ' '.join(text.split())[:max_length]


def format_names(names: list[str], max_names: int = 4) -> str:
    """Join names by commas; after the first `max_names`, give the number of the others."""
    more = f' and {len(names) - max_names} more' if len(names) > max_names else ''
    return ', '.join(names[:max_names]) + more


def format_extra_command(extra: str) -> str:
    """Return the command that installs an optional extra of sinklab, such as `hf`, in a clone."""
    return f"pip install -e '.[{extra}]'"
