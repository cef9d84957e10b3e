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
from sinklab.streams import unescaped

GAP = 2  # cells between two columns
LEAST = 8  # cells of a column of names or words in a line that is short


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


def console(stderr: bool = False, width: int | None = None) -> Console:
    """Make a console for which text is text: no markup, no :emoji:, no highlighting.

    Args:
        stderr: whether it writes to standard error.
        width: of lines that do not go to a terminal, where COLUMNS does not say it; without it rich decides.
    """
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(
        file=unescaped(stream),
        markup=False,
        emoji=False,
        highlight=False,
        width=None if stream.isatty() or os.environ.get('COLUMNS', '').isdigit() else width,
    )


def is_live(console: Console) -> bool:
    """Return whether a line of the console can be written over: not in a file or a pipe, nor with TERM=dumb."""
    return console.is_interactive and console.file.isatty()


def cell(text: object, style: str = '') -> Text:
    """Return a text for a cell, a heading or a title, in which nothing is markup."""
    return Text(escape_control(text), style)


def column(template: str) -> TextColumn:
    """Return a column of a progress bar whose fields are no markup."""
    return TextColumn(template, markup=False)


def print_table(
    out: Console,
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    left: Iterable[object] = (),
    words: Iterable[object] = (),
    **look: Any,
) -> None:
    """Print a table whose numbers are whole however narrow the terminal is.

    The first column holds names, which are folded where there is no room. Where the numbers do not fit beside them,
    the table is printed in several pieces, each beginning with the names.

    Args:
        headings, rows: text, or Text of rich.
        left: headings of the other columns that are aligned to the left.
        words: headings of other columns that hold words, and may be folded, too.
    """
    columns = [list(map(as_text, column)) for column in zip(headings, *rows, strict=True)]
    words = {str(heading) for heading in words}
    left = {str(heading) for heading in left} | words
    widths = [max(line.cell_len for text in column for line in text.split('\n') or [text]) for column in columns]
    foldable = [at == 0 or str(heading) in words for at, heading in enumerate(headings)]
    room = out.width
    if sum(widths) + GAP * len(widths) > room:
        widths = narrowed(widths, foldable, room)
    pieces = split(widths, room)
    out.width = max(room, *(sum(widths[one] + GAP for one in piece) for piece in pieces))
    for at, piece in enumerate(pieces):
        table = Table(box=None, **(look if at == 0 else {}))
        for one in piece:
            folds = foldable[one]
            table.add_column(
                columns[one][0],
                justify='left' if one == 0 or str(headings[one]) in left else 'right',
                overflow='fold',
                no_wrap=not folds,
                width=widths[one] if folds else None,
                min_width=widths[one],
            )
        for row in zip(*(columns[one][1:] for one in piece), strict=True):
            table.add_row(*row)
        out.print(table, *([''] if at + 1 < len(pieces) else []), sep='\n')
    out.width = room


def narrowed(widths: list[int], foldable: list[bool], room: int) -> list[int]:
    """Return widths of columns of which those that may be folded share what the others leave of a line.

    Where that is too little, they share a third of the line, and the table is to be split.
    """
    folded = sorted((at for at, folds in enumerate(foldable) if folds), key=widths.__getitem__)
    left = room - GAP * len(widths) - sum(width for width, folds in zip(widths, foldable, strict=True) if not folds)
    if left < LEAST * len(folded):
        left = max(room // 3, LEAST * len(folded))
    widths = [*widths]
    for before, at in enumerate(folded):  # the narrowest first: what it does not need is for the others
        widths[at] = min(widths[at], left // (len(folded) - before))
        left -= widths[at]
    return widths


def split(widths: list[int], room: int) -> list[list[int]]:
    """Divide the columns of a table into pieces that fit, each with the first column."""
    pieces = [[0]]
    for at in range(1, len(widths)):
        piece = pieces[-1]
        if len(piece) > 1 and sum(widths[one] for one in piece) + widths[at] + GAP * (len(piece) + 1) > room:
            pieces.append([0])
        pieces[-1].append(at)
    return pieces


def as_text(given: object) -> Text:
    return given if isinstance(given, Text) else cell(given)


def lines(*given: str | None) -> Text:
    """Return a cell of several lines, without those that are empty."""
    return Text('\n').join(cell(one) for one in given if one)
