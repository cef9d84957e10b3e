"""The error that users can correct, and the text of an exception on one line."""

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
    name, message = type(error).__name__, ' '.join(str(error).split())[:max_length]
    return f'{name}: {message}' if with_type and message else message or name
