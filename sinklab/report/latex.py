"""The table by row for a paper, by booktabs."""

from collections.abc import Mapping
from pathlib import Path

from sinklab.escape import escape_latex
from sinklab.files.whole import whole
from sinklab.report import sweep
from sinklab.report.arms import arms, in_sweep, table
from sinklab.report.runs import Run


def write(path: Path, runs: list[Run]) -> None:
    found = arms(runs)
    with whole(path) as unfinished:
        unfinished.write_text(text(table(found), sweep.spans(list(map(in_sweep, found)))), encoding='utf-8')


def text(rows: list[dict], spans: Mapping | None = None) -> str:
    headings, cells = sweep.cells(rows, spans)
    if any(row['direction'] for row in rows):
        headings, cells = (
            [*headings, 'direction'],
            [[*one, row['direction']] for one, row in zip(cells, rows, strict=True)],
        )
    left = ('row', 'end', 'direction')
    columns = ''.join('l' if heading in left else 'r' for heading in headings)
    return '\n'.join(
        [
            '% mean and sample standard deviation over n seeds (published, at the size of its source)',
            rf'\begin{{tabular}}{{{columns}}}',
            r'\toprule',
            line(headings),
            r'\midrule',
            *map(line, cells),
            r'\bottomrule',
            r'\end{tabular}',
            '',
        ]
    )


def line(cells: list[str]) -> str:
    return ' & '.join(map(escape_latex, cells)) + r' \\'
