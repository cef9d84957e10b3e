"""Text and tables on a terminal: names are shown without markup, and numbers are never truncated."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich import console
from rich.cells import cell_len
from rich.table import Table

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


def print_wrapped(text: str, console: Console | None = None) -> None:
    """Print a text, wrapped between words on a terminal; without a console, to standard output."""
    console = console or make_console()
    console.print(text, soft_wrap=not console.file.isatty())


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    left_columns: Iterable[str] = (),
    wrap_columns: Iterable[str] = (),
) -> None:
    """Print a table whose numbers are never truncated.

    If the columns do not fit beside each other, the table is printed in pieces, each with the first column.

    Args:
        console: The console to print to.
        headings: One for each column. The first column holds names, which may be folded.
        rows: The cells of each row.
        left_columns: Headings of the columns that are left-aligned, besides the first one.
        wrap_columns: Headings of the columns of text that are left-aligned and may be wrapped, besides the first one.
    """
    wrap_columns = {headings[0], *wrap_columns}
    left_columns = {*wrap_columns, *left_columns}
    columns = [list(map(str, cells)) for cells in zip(headings, *rows, strict=True)]
    widths = [COLUMN_GAP + max(cell_len(line) for cell in cells for line in cell.split('\n')) for cells in columns]
    first_width = widths[0]
    for index, heading in enumerate(headings):
        if heading in wrap_columns:
            widths[index] = min(widths[index], COLUMN_GAP + MIN_TEXT_WIDTH)
    if sum(widths) > console.width:  # it needs several pieces, in which names may take a third
        widths[0] = max(widths[0], min(first_width, COLUMN_GAP + console.width // 3))
    pieces: list[list[list[str]]] = []
    for cells, width in zip(columns, widths, strict=True):
        if not pieces:
            first_width = used_width = width
            pieces.append([])
        elif used_width + width > console.width and len(pieces[-1]) > 1:
            used_width = first_width
            pieces.append([columns[0]])
        pieces[-1].append(cells)
        used_width += width
    for piece in pieces:
        table = Table(box=None)
        for heading, *_ in piece:
            justify = 'left' if heading in left_columns else 'right'
            table.add_column(heading, justify=justify, overflow='fold', no_wrap=heading not in wrap_columns)
        for row in zip(*(cells[1:] for cells in piece), strict=True):
            table.add_row(*row)
        console.print(table)
