"""Escaping of text that comes from users, files or other hosts, for each format that it is written to.

A name may contain any character: markup of rich, `$` of mathtext, `&` of LaTeX, `<` of HTML, `/` of a path, a control
sequence of a terminal. Each function returns text that its format shows as the given characters. Control and format
characters have no glyph: they are shown as escapes of Python, such as \x1b, everywhere but in JSON.
"""

import hashlib
import html
import re
import shlex
import string
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Unicode categories of characters that have no glyph, or that change how others are shown: controls (C0, DEL, C1),
# surrogates, line and paragraph separators, and format characters, such as the zero-width space (U+200B), the byte
# order mark (U+FEFF), and marks that change the direction of the text after them (U+202E).
HIDDEN_CATEGORIES = ('Cc', 'Cs', 'Zl', 'Zp', 'Cf')
JOINERS = '\u200c\u200d'  # format characters that belong to the spelling of Persian and Hindi, and to emoji
MAX_NAME_BYTES = 200  # bytes of a file name; file systems allow 255, and suffixes need some
FIGURE_LINE_CHARS = 60  # characters of a line in a figure
# LaTeX has defined these commands for all font encodings since 2020.
LATEX_COMMANDS = {char: f'\\{char}' for char in '&%$#_{}'}
LATEX_COMMANDS |= {
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    '<': r'\textless{}',
    '>': r'\textgreater{}',
    '|': r'\textbar{}',
    '`': r'\textasciigrave{}',
    "'": r'\textquotesingle{}',
    # Fonts show `"` as a closing quote. \textquotedbl works with the encoding T1 only and is an error without it, so
    # two straight single quotes stand for the straight double one: they look alike, with all fonts and without a
    # package.
    '"': r'\textquotesingle{}\textquotesingle{}',
    '±': r'$\pm$',
    '−': '$-$',
}


def is_hidden(char: str) -> bool:
    """Return whether a character has no glyph, or changes how others are shown; JOINERS are not hidden."""
    if char in string.printable:
        return char in '\t\n\r\x0b\x0c'
    return unicodedata.category(char) in HIDDEN_CATEGORIES and char not in JOINERS


def escape_control(text: object, keep: str = '') -> str:
    """Replace characters for which `is_hidden` is True by visible escapes, such as \\x1b, \\n, \\u200b.

    Args:
        text: Any object; its `str` is escaped.
        keep: Control characters that are not escaped.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return ''.join(
        char.encode('unicode_escape').decode() if char not in keep and is_hidden(char) else char for char in text
    )


def escape_html(text: object) -> str:
    """Escape text for the content, or a quoted attribute, of an HTML element."""
    return html.escape(escape_control(text))


def escape_latex(text: object) -> str:
    """Escape text for LaTeX, also for the first cell of a table row."""
    escaped = ''.join(LATEX_COMMANDS.get(char, char) for char in escape_control(text))
    escaped = re.sub('(?<=-)-|(?<=,),', lambda match: f'{{}}{match[0]}', escaped)  # prevent ligatures
    return f'{{}}{escaped}' if escaped[:1] in ('[', '*') else escaped  # else an argument of the row before


def escape_markdown(text: object) -> str:
    """Escape text for a cell of a Markdown table: pipes, tags and character references, but not emphasis.

    Backslashes are escaped, too: one in front of an escaped character would cancel the backslash that is inserted.
    """
    return re.sub(r'\\|\||<(?=[A-Za-z/!?])|&(?=#?\w+;)', r'\\\g<0>', escape_control(text))


def escape_figure(text: object) -> str:
    """Escape text for Matplotlib, and break long names into several lines.

    FIGURE_RC_PARAMS must be in effect while a figure is made, or `$` would start a formula.
    """
    escaped = escape_control(text)
    return '\n'.join(
        escaped[start : start + FIGURE_LINE_CHARS] for start in range(0, len(escaped), FIGURE_LINE_CHARS)
    )


# Settings of Matplotlib with which text is drawn literally.
FIGURE_RC_PARAMS: dict[Any, Any] = {'text.parse_math': False, 'text.usetex': False}


def quote_file_name(text: object) -> str:
    """Convert any text to a file name, which is the same for the same text and another for other text.

    Special characters of paths and globs, a leading dot, and control characters become %XX, as in a URL. A name that
    is too long ends with a digest. An empty text stays empty.
    """
    text = str(text)
    safe = re.sub(r'%(?=[0-9A-Fa-f]{2})', '%25', text)
    safe = ''.join(percent_encode(char) if char in '/\\*?[' or is_hidden(char) else char for char in safe)
    safe = re.sub(r'^\.', '%2E', safe)  # * of a shell does not match names that begin with a dot
    encoded = safe.encode()
    if len(encoded) <= MAX_NAME_BYTES:
        return safe
    digest = hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]
    return f'{encoded[: MAX_NAME_BYTES - 17].decode(errors="ignore")}-{digest}'


def percent_encode(char: str) -> str:
    return ''.join(f'%{byte:02X}' for byte in char.encode(errors='surrogatepass'))


def quote_shell(word: object) -> str:
    """Quote a word for a shell command; hidden characters need the $'...' syntax of bash and zsh."""
    word = str(word)
    if not any(map(is_hidden, word)):
        return shlex.quote(word)
    encoded = word.encode(errors='surrogateescape') if is_encodable(word) else word.encode(errors='backslashreplace')
    escaped = ''.join(chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f'\\x{byte:02x}' for byte in encoded)
    return f"$'{escaped}'"


def is_encodable(word: str) -> bool:
    try:
        word.encode(errors='surrogateescape')
    except UnicodeEncodeError:
        return False
    return True


def join_shell(words: Iterable[object]) -> str:
    """Join words into a command line that a shell splits into the same words."""
    return ' '.join(map(quote_shell, words))


def get_program_argv() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def format_command_line() -> str:
    """Format the command line of this process so that the user can run it again."""
    return join_shell([*get_program_argv(), *sys.argv[1:]])
