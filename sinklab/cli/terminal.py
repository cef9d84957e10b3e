"""Text and tables on a terminal: names are shown as they are given, and numbers are never cut off."""

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
MIN_COLUMN_WIDTH = 8  # cells of a column of names or words in a line that is short


class SafeConsole(Console):
    """A console that shows control characters as escapes; its own sequences for colours and lines still work.

    It never hides the cursor: a process that is killed could not show it again.
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
    """Make a console for which text is text: no markup, no :emoji:, no highlighting.

    Args:
        stderr: whether it writes to standard error.
        width: of lines that do not go to a terminal, where COLUMNS does not say it; without it rich decides.
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
    """Return whether a line of the console can be written over: not in a file or a pipe, nor with TERM=dumb."""
    return console.is_interactive and console.file.isatty()


def make_cell(text: object, style: str = '') -> Text:
    """Return a text for a cell, a heading or a title, in which nothing is markup."""
    return Text(escape_control(text), style)


def make_progress_column(template: str) -> TextColumn:
    """Return a column of a progress bar whose fields are no markup."""
    return TextColumn(template, markup=False)


def print_table(
    console: Console,
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    left_columns: Iterable[object] = (),
    wrap_columns: Iterable[object] = (),
    **table_options: Any,
) -> None:
    """Print a table whose numbers are whole however narrow the terminal is.

    The first column holds names, which are folded where there is no room. Where the numbers do not fit beside them,
    the table is printed in several pieces, each beginning with the names.

    Args:
        headings, rows: text, or Text of rich.
        left_columns: headings of the other columns that are aligned to the left.
        wrap_columns: headings of other columns that hold words, and may be folded, too.
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
    """Return widths of columns of which those that may be folded share what the others leave of a line.

    Where that is too little, they share a third of the line, and the table is to be split.
    """
    foldable_indices = sorted((index for index, can_fold in enumerate(foldable) if can_fold), key=widths.__getitem__)
    remaining = (
        total_width
        - COLUMN_GAP * len(widths)
        - sum(width for width, can_fold in zip(widths, foldable, strict=True) if not can_fold)
    )
    if remaining < MIN_COLUMN_WIDTH * len(foldable_indices):
        remaining = max(total_width // 3, MIN_COLUMN_WIDTH * len(foldable_indices))
    widths = [*widths]
    for rank, index in enumerate(foldable_indices):  # the narrowest first: what it does not need is for the others
        widths[index] = min(widths[index], remaining // (len(foldable_indices) - rank))
        remaining -= widths[index]
    return widths


def split_columns(widths: list[int], total_width: int) -> list[list[int]]:
    """Divide the columns of a table into pieces that fit, each with the first column."""
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
    """Return a cell of several lines, without those that are empty."""
    return Text('\n').join(make_cell(text) for text in texts if text)
