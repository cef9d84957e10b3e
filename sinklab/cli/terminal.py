"""Text and tables on a terminal: names are shown without markup, and numbers are never truncated."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import console
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

COLUMN_GAP = 2  # cells between two columns
MIN_TEXT_WIDTH = 8  # minimum width in cells of a column of text that is folded or wrapped


class Console(console.Console):
    """Console that raises BrokenPipeError when its reader has gone; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling


def make_console(stderr: bool = False, width: int | None = None) -> Console:
    """Make a console without markup, :emoji: and highlighting.

    Args:
        stderr: True: write to standard error; False: to standard output.
        width: Width of lines if the output is no terminal and COLUMNS is not set; None: rich decides.
    """
    is_width_known = (sys.stderr if stderr else sys.stdout).isatty() or 'COLUMNS' in os.environ
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=None if is_width_known else width)


def discard_stdout() -> None:
    """Send to the null device what standard output cannot write, which Python flushes once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_live(console: Console) -> bool:
    """Return whether lines of the console can be overwritten: not in a file or a pipe, nor with TERM=dumb."""
    return console.is_interactive and console.file.isatty()


def print_wrapped(text: str) -> None:
    """Print a text, wrapped between words on a terminal."""
    console = make_console()
    console.print(text, soft_wrap=not console.is_terminal)


def make_cell(text: object, style: str = '') -> Text:
    """Make a text without markup for a cell, a heading or a title of a table."""
    return Text(str(text), style)


def make_multiline_cell(*texts: str | None) -> Text:
    """Make a cell with one line for each text that is not empty."""
    return Text('\n'.join(filter(None, texts)))


def print_table(
    console: Console,
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    left_columns: Iterable[object] = (),
    wrap_columns: Iterable[object] = (),
    **table_options: Any,
) -> None:
    """Print a table whose numbers are never truncated.

    If the columns do not fit beside each other, the table is printed in pieces, each with the first column.

    Args:
        console: The console to print to.
        headings: One for each column: a text, or a Text of rich. The first column holds names, which may be folded.
        rows: The cells of each row: a text, or a Text of rich.
        left_columns: Headings of the columns that are left-aligned, besides the first one.
        wrap_columns: Headings of the columns of text that are left-aligned and may be wrapped, besides the first one.
        **table_options: Options of rich.table.Table, such as a title, for the first piece.
    """
    wrap_columns = {str(headings[0]), *map(str, wrap_columns)}
    left_columns = {*wrap_columns, *map(str, left_columns)}
    columns = [
        [cell if isinstance(cell, Text) else make_cell(cell) for cell in cells]
        for cells in zip(headings, *rows, strict=True)
    ]
    pieces: list[list[list[Text]]] = []
    for cells in columns:
        width = COLUMN_GAP + max(cell_len(line) for cell in cells for line in cell.plain.split('\n'))
        if str(cells[0]) in wrap_columns:
            width = min(width, COLUMN_GAP + MIN_TEXT_WIDTH)
        if not pieces:
            first_width = used_width = width
            pieces.append([])
        elif used_width + width > console.width and len(pieces[-1]) > 1:
            used_width = first_width
            pieces.append([columns[0]])
        pieces[-1].append(cells)
        used_width += width
    for piece in pieces:
        table = Table(box=None, **table_options)
        table_options = {}
        for heading, *_ in piece:
            justify = 'left' if str(heading) in left_columns else 'right'
            table.add_column(heading, justify=justify, overflow='fold', no_wrap=str(heading) not in wrap_columns)
        for row in zip(*(cells[1:] for cells in piece), strict=True):
            table.add_row(*row)
        console.print(table)
