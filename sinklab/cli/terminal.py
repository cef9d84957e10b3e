"""Text and tables on a terminal: names are shown without markup, and numbers are never truncated."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sinklab.escape import escape_control
from sinklab.standard_streams import get_unescaped_stream

COLUMN_GAP = 2  # cells between two columns
MIN_COLUMN_WIDTH = 8  # minimum width in cells of a column of text on a narrow terminal


class SafeConsole(Console):
    """Console that escapes control characters in text; its own sequences for colours and lines still work.

    It never hides the cursor, because a killed process could not show it again.
    """

    def show_cursor(self, show: bool = True) -> bool:
        return False

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escape_control(segment.text, keep='\n'), segment.style)


def make_console(stderr: bool = False, width: int | None = None) -> Console:
    """Make a console without markup, :emoji: and highlighting.

    Args:
        stderr: True: write to standard error; False: to standard output.
        width: Width of lines if the output is no terminal and COLUMNS is not set; None: rich decides.
    """
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(
        file=get_unescaped_stream(stream),
        markup=False,
        emoji=False,
        highlight=False,
        width=None if stream.isatty() or os.environ.get('COLUMNS', '').isdigit() else width,
    )


def is_live(console: Console) -> bool:
    """Return whether lines of the console can be overwritten: not in a file or a pipe, nor with TERM=dumb."""
    return console.is_interactive and console.file.isatty()


def make_cell(text: object, style: str = '') -> Text:
    """Make a text without markup for a cell, a heading or a title of a table."""
    return Text(escape_control(text), style)


def make_progress_column(template: str) -> TextColumn:
    """Make a column of a progress bar whose fields are shown without markup."""
    return TextColumn(template, markup=False)


def print_table(
    console: Console,
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    left_columns: Iterable[object] = (),
    wrap_columns: Iterable[object] = (),
    **table_options: Any,
) -> None:
    """Print a table whose numbers are never truncated, even on a narrow terminal.

    The first column holds names, which are wrapped if they do not fit. If the numbers do not fit beside the names,
    the table is printed in several pieces, each with the column of names.

    Args:
        console: The console to print to.
        headings: One for each column: a text, or a Text of rich.
        rows: The cells of each row: a text, or a Text of rich.
        left_columns: Headings of the columns that are left-aligned, besides the first one.
        wrap_columns: Headings of the columns of text that are left-aligned and may be wrapped, besides the first one.
        **table_options: Options of rich.table.Table, such as a title, for the first piece.
    """
    columns = [list(map(to_text, column)) for column in zip(headings, *rows, strict=True)]
    wrap_columns = {str(heading) for heading in wrap_columns}
    left_columns = {str(heading) for heading in left_columns} | wrap_columns
    widths = [max(line.cell_len for text in column for line in text.split('\n') or [text]) for column in columns]
    foldable = [index == 0 or str(heading) in wrap_columns for index, heading in enumerate(headings)]
    total_width = console.width
    if sum(widths) + COLUMN_GAP * len(widths) > total_width:
        widths = shrink_widths(widths, foldable, total_width)
    pieces = split_columns(widths, total_width)
    console.width = max(
        total_width, *(sum(widths[column_index] + COLUMN_GAP for column_index in piece) for piece in pieces)
    )
    for index, piece in enumerate(pieces):
        table = Table(box=None, **(table_options if index == 0 else {}))
        for column_index in piece:
            can_fold = foldable[column_index]
            table.add_column(
                columns[column_index][0],
                justify='left' if column_index == 0 or str(headings[column_index]) in left_columns else 'right',
                overflow='fold',
                no_wrap=not can_fold,
                width=widths[column_index] if can_fold else None,
                min_width=widths[column_index],
            )
        for row in zip(*(columns[column_index][1:] for column_index in piece), strict=True):
            table.add_row(*row)
        console.print(table, *([''] if index + 1 < len(pieces) else []), sep='\n')
    console.width = total_width


def shrink_widths(widths: list[int], foldable: list[bool], total_width: int) -> list[int]:
    """Shrink the columns that can be wrapped to the width that the other columns leave.

    If that width is too small, these columns share a third of the line, and the table has to be split.
    """
    foldable_indices = sorted((index for index, can_fold in enumerate(foldable) if can_fold), key=widths.__getitem__)
    remaining = (
        total_width
        - COLUMN_GAP * len(widths)
        - sum(width for width, can_fold in zip(widths, foldable, strict=True) if not can_fold)
    )
    min_width = sum(min(widths[index], MIN_COLUMN_WIDTH) for index in foldable_indices)
    if remaining < min_width:
        remaining = max(total_width // 3, min_width)
    widths = [*widths]
    for rank, index in enumerate(foldable_indices):  # narrowest first: others share what it leaves
        widths[index] = min(widths[index], remaining // (len(foldable_indices) - rank))
        remaining -= widths[index]
    return widths


def split_columns(widths: list[int], total_width: int) -> list[list[int]]:
    """Split the columns of a table into pieces that fit the width, each with the first column."""
    pieces = [[0]]
    for index in range(1, len(widths)):
        piece = pieces[-1]
        if (
            len(piece) > 1
            and sum(widths[column_index] for column_index in piece) + widths[index] + COLUMN_GAP * (len(piece) + 1)
            > total_width
        ):
            pieces.append([0])
        pieces[-1].append(index)
    return pieces


def to_text(value: object) -> Text:
    return value if isinstance(value, Text) else make_cell(value)


def make_multiline_cell(*texts: str | None) -> Text:
    """Make a cell with one line for each text that is not empty."""
    return Text('\n').join(make_cell(text) for text in texts if text)
