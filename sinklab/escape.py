"""Escaping of names for figures, for tables in Markdown, and for file names."""

import re
from typing import Any

# Settings of Matplotlib with which text is drawn literally.
FIGURE_RC_PARAMS: dict[Any, Any] = {'text.parse_math': False, 'text.usetex': False}


def escape_markdown(text: object) -> str:
    """Escape text for a cell of a Markdown table: pipes, tags and character references, but not emphasis."""
    return re.sub(r'\\|\||<(?=[A-Za-z/!?])|&(?=#?\w+;)', r'\\\g<0>', str(text))


def quote_file_name(text: str) -> str:
    """Convert any text to a file name, which is the same for the same text and another for other text.

    Special characters of paths and globs, control characters and a leading dot become %XX, as in a URL.
    """
    unsafe = r'[/\\*?[\x00-\x1f]|^\.|%(?=[0-9A-Fa-f]{2})'
    return re.sub(unsafe, lambda match: f'%{ord(match[0]):02X}', text)
