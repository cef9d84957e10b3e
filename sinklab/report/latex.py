"""LaTeX export of the table by row, for the booktabs package."""

import re
from collections.abc import Mapping
from pathlib import Path

from sinklab.metrics.emergence import EmergenceSpan
from sinklab.report import sweep_table
from sinklab.report.run_groups import group_runs, make_group_table, make_row_result
from sinklab.report.runs import RunResult
from sinklab.storage.files import atomic_write

# LaTeX has defined these commands for all font encodings since 2020.
LATEX_COMMANDS = {char: f'\\{char}' for char in '&%$#_{}'}
LATEX_COMMANDS |= {
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    '<': r'\textless{}',
    '>': r'\textgreater{}',
    '|': r'\textbar{}',
    '±': r'$\pm$',
    '−': '$-$',
}


def write_latex_table(path: Path, runs: list[RunResult]) -> None:
    """Write the table by row as a LaTeX tabular, replacing the file atomically."""
    run_groups = group_runs(runs)
    with atomic_write(path) as unfinished:
        unfinished.write_text(
            format_latex_table(
                make_group_table(run_groups), sweep_table.compute_spans(list(map(make_row_result, run_groups)))
            ),
            encoding='utf-8',
        )


def format_latex_table(rows: list[dict], spans: Mapping[str, EmergenceSpan]) -> str:
    """Format the table by row as a LaTeX tabular.

    Args:
        rows: The entries of `make_group_table`.
        spans: The result of `sweep_table.compute_spans`.
    """
    headings, cells = sweep_table.format_table_cells(rows, spans)
    if any(row['direction'] for row in rows):
        headings, cells = (
            [*headings, 'direction'],
            [[*row_cells, row['direction']] for row_cells, row in zip(cells, rows, strict=True)],
        )
    left_aligned = ('row', 'end', 'direction')
    alignment = ''.join('l' if heading in left_aligned else 'r' for heading in headings)
    return '\n'.join(
        [
            '% mean and sample standard deviation over n seeds (published, at the size of its source)',
            rf'\begin{{tabular}}{{{alignment}}}',
            r'\toprule',
            format_latex_row(headings),
            r'\midrule',
            *map(format_latex_row, cells),
            r'\bottomrule',
            r'\end{tabular}',
            '',
        ]
    )


def format_latex_row(cells: list[str]) -> str:
    return ' & '.join(map(escape_latex, cells)) + r' \\'


def escape_latex(text: str) -> str:
    """Escape text for LaTeX, also for the first cell of a table row."""
    escaped = ''.join(LATEX_COMMANDS.get(char, char) for char in text)
    escaped = re.sub('(?<=-)-', '{}-', escaped)  # no ligature
    return f'{{}}{escaped}' if escaped[:1] in ('[', '*') else escaped  # else an argument of the row before
