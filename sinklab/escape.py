"""Text that comes from users, files or other hosts, escaped for each kind of place that it is written to.

A name may hold any character: markup of rich, `$` of mathtext, `&` of LaTeX, `<` of HTML, `/` of a path, a control
sequence of a terminal. Each function returns text that the place shows as the characters that were given. Control and
format characters have no picture: they are shown as the escapes of Python, such as \\x1b, everywhere but in JSON.
"""

import hashlib
import html
import re
import shlex
import string
import unicodedata
from collections.abc import Iterable
from typing import Any

# Categories of characters that have no picture, or change how others are shown: controls (C0, DEL, C1), halves of
# characters, separators of lines and paragraphs, and format characters, such as a space of no width (U+200B), the
# mark of the order of bytes (U+FEFF), and marks after which text is shown in another order than given (U+202E).
HIDDEN_CATEGORIES = ('Cc', 'Cs', 'Zl', 'Zp', 'Cf')
JOINERS = '\u200c\u200d'  # format characters that belong to the spelling of Persian and Hindi, and to emoji
MAX_NAME_BYTES = 200  # bytes of a file name, of the 255 that file systems allow; what is appended needs some
FIGURE_LINE_CHARS = 60  # letters of a line in a picture
# LaTeX defines these commands for all encodings of fonts, since 2020.
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
    # Fonts show `"` as a closing quote. \textquotedbl is for the encoding T1 alone and an error without it, so two
    # straight single quotes stand for the straight double one: they look alike, with all fonts and without a package.
    '"': r'\textquotesingle{}\textquotesingle{}',
    '±': r'$\pm$',
    '−': '$-$',
}


def is_hidden(char: str) -> bool:
    """Return whether a character has no picture of its own, or changes how others are shown; but for JOINERS."""
    if char in string.printable:
        return char in '\t\n\r\x0b\x0c'
    return unicodedata.category(char) in HIDDEN_CATEGORIES and char not in JOINERS


def escape_control(text: object, keep: str = '') -> str:
    """Replace characters that `is_hidden` names by visible escapes, as \\x1b, \\n, \\u200b.

    Args:
        text: anything; its `str` is shown.
        keep: control characters that stay as they are.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return ''.join(
        char.encode('unicode_escape').decode() if char not in keep and is_hidden(char) else char for char in text
    )


def escape_html(text: object) -> str:
    """Escape text for the content, or a quoted attribute, of an element of HTML."""
    return html.escape(escape_control(text))


def escape_latex(text: object) -> str:
    """Escape text for LaTeX, also for the first cell of a line of a table."""
    escaped = ''.join(LATEX_COMMANDS.get(char, char) for char in escape_control(text))
    escaped = re.sub('(?<=-)-|(?<=,),', lambda match: f'{{}}{match[0]}', escaped)  # or it were one character
    return f'{{}}{escaped}' if escaped[:1] in ('[', '*') else escaped  # or it were an argument of the line before


def escape_markdown(text: object) -> str:
    """Escape what would end a cell of a table of Markdown, begin a tag or be a character reference; emphasis stays.

    Backslashes are escaped, too: one in front of a character would take away the effect of that which is put there.
    """
    return re.sub(r'\\|\||<(?=[A-Za-z/!?])|&(?=#?\w+;)', r'\\\g<0>', escape_control(text))


def escape_figure(text: object) -> str:
    """Return text for Matplotlib: long names in several lines.

    What `$` means there depends on the settings of FIGURE_RC_PARAMS, which must hold while a figure is made.
    """
    escaped = escape_control(text)
    return '\n'.join(
        escaped[start : start + FIGURE_LINE_CHARS] for start in range(0, len(escaped), FIGURE_LINE_CHARS)
    )


# Settings of Matplotlib with which text is drawn as it is given.
FIGURE_RC_PARAMS: dict[Any, Any] = {'text.parse_math': False, 'text.usetex': False}


def quote_file_name(text: object) -> str:
    """Return a name for a file or folder made from any text: the same for the same text, another one for others.

    What a path or a glob reads as something else, a dot in front, and control characters become %XX, as in a URL.
    A name that is too long ends with a digest. An empty text stays empty.
    """
    text = str(text)
    safe = re.sub(r'%(?=[0-9A-Fa-f]{2})', '%25', text)
    safe = ''.join(percent_encode(char) if char in '/\\*?[' or is_hidden(char) else char for char in safe)
    safe = re.sub(r'^\.', '%2E', safe)  # a shell's * leaves out names that begin with a dot
    encoded = safe.encode()
    if len(encoded) <= MAX_NAME_BYTES:
        return safe
    digest = hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]
    return f'{encoded[: MAX_NAME_BYTES - 17].decode(errors="ignore")}-{digest}'


def percent_encode(char: str) -> str:
    return ''.join(f'%{byte:02X}' for byte in char.encode(errors='surrogatepass'))


def quote_shell(word: object) -> str:
    """Quote a word of a command that a person may copy into a shell; control characters by $'...' of bash and zsh."""
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
    """Join words to one command line that a shell splits into the same words."""
    return ' '.join(map(quote_shell, words))
