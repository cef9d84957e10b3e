"""The HTML report (report.html): one file that needs no network.

assets/page.html is its template, and the scripts of assets/ draw the figures. Plotly would add 4.6 MB to each page,
has a separate slider for each figure and does not support screen readers. Tables and titles are plain HTML, so they
are visible without JavaScript.
"""

import base64
import gzip
import html
import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sinklab.errors import format_names
from sinklab.report import summary_table, sweep_table
from sinklab.report.figures import Figure, list_runs, make_figures
from sinklab.report.run_groups import RunGroup, group_runs, make_group_table
from sinklab.report.runs import RunResult, list_run_metrics
from sinklab.storage.files import write_text

ASSETS_DIR = Path(__file__).parent / 'assets'
SCRIPTS = ('utils.js', 'colours.js', 'lines.js', 'panels.js', 'maps.js', 'controls.js', 'main.js')
TEXT_KEYS = ('title', 'sentence')  # of figures; they are written as HTML
EMPTY_CELLS = ('', '-')
MAX_OPEN_RUNS = 12  # with more runs, the table by run is collapsed at first
ROWS_SENTENCE = (
    'Results as mean ± sample standard deviation over seeds, and published values of other models in parentheses.'
)


def write_report_page(path: Path, runs: list[RunResult]) -> None:
    """Write the HTML report of runs, replacing the file atomically.

    Args:
        path: The HTML file.
        runs: At least one run.
    """
    run_groups = group_runs(runs)
    rows = make_group_table(run_groups)
    write_text(path, render_page(run_groups, rows, make_figures(run_groups)))


def render_page(run_groups: list[RunGroup], rows: list[dict], figures: list[Figure]) -> str:
    """Render the HTML document with its tables, figures, styles and scripts."""
    return string.Template(read_asset('page.html')).substitute(
        title=html.escape(f'Attention sinks: {format_names([run_group.name for run_group in run_groups])}'),
        headline=html.escape(sweep_table.format_headline(rows)),
        style=read_asset('page.css'),
        tables=render_rows_table(rows) + render_runs_table(run_groups),
        figures=''.join(map(render_figure, figures)),
        payload=pack_figures(run_groups, figures),
        scripts=''.join(map(read_asset, SCRIPTS)),
    )


def read_asset(name: str) -> str:
    return (ASSETS_DIR / name).read_text(encoding='utf-8')


def pack_figures(run_groups: list[RunGroup], figures: list[Figure]) -> str:
    """Pack the figures as JSON, compressed by gzip, in base64, which assets/main.js unpacks.

    An array in the JSON is [dtype, its bytes in base64].
    """

    def encode_array(array: np.ndarray) -> list[str]:
        return [array.dtype.str[1:], base64.b64encode(array.tobytes()).decode()]

    runs = list_runs(run_groups)
    group_names = [run_group.name for run_group in run_groups]
    content = dict(
        steps=sorted({step for run in runs for step in run.probe_steps}),
        groups=[dict(name=name) for name in group_names],
        runs=[dict(name=run.name, group=group_names.index(run.group_name)) for run in runs],
        figures=[{key: value for key, value in figure.items() if key not in TEXT_KEYS} for figure in figures],
    )
    text = json.dumps(content, allow_nan=False, separators=(',', ':'), default=encode_array)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def render_figure(figure: Figure) -> str:
    name = html.escape(figure['name'])
    return (
        f'<section class="figure" id="figure-{name}" aria-labelledby="title-{name}">'
        f'<h2 id="title-{name}">{html.escape(figure["title"])}</h2><p>{html.escape(figure["sentence"])}</p>'
        '<div class="plot"></div></section>'
    )


def render_rows_table(rows: list[dict]) -> str:
    headings, lines = sweep_table.format_table_cells(rows)
    return render_table('rows', 'By row', ROWS_SENTENCE, headings, list(enumerate(lines)))


def render_runs_table(run_groups: list[RunGroup]) -> str:
    table_rows, notes = [], []
    for group_index, run_group in enumerate(run_groups):
        for run in run_group.runs:
            entry = summary_table.make_run_row(run)
            table_rows.append((group_index, summary_table.format_run_cells(entry)))
            notes += [f'{run.name}: {note}' for note in (*run.notes, entry['message']) if note]
    table = render_table('runs', '', '', summary_table.list_run_headings(), table_rows)
    notes_html = ''.join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    is_open = ' open' if len(table_rows) <= MAX_OPEN_RUNS else ''
    return f'<details class="runs"{is_open}><summary>By run: {len(table_rows)}</summary>{table}{notes_html}</details>'


def render_table(
    name: str, title: str, sentence: str, headings: Sequence[str], table_rows: list[tuple[int, list]]
) -> str:
    """Render an HTML table in a scrollable frame, without its empty columns.

    Args:
        name: The suffix of the id of the section.
        title: The title, or an empty string for neither title nor sentence.
        sentence: The paragraph under the title.
        headings: The headings of the columns.
        table_rows: (index of the run group, cells) of each row.
    """
    shown = [
        column
        for column in range(len(headings))
        if column == 0 or any(cells[column] not in EMPTY_CELLS for _, cells in table_rows)
    ]
    meanings = {metric_info.label: metric_info.description for metric_info in list_run_metrics()}
    head_html = body_html = ''
    for column in shown:
        meaning = html.escape(meanings.get(headings[column].partition(' (')[0], ''))
        head_html += f'<th scope="col" title="{meaning}">{html.escape(headings[column])}</th>'
    for group_index, cells in table_rows:
        cells_html = ''.join(render_cell(column, cells[column]) for column in shown)
        body_html += f'<tr data-group="{group_index}">{cells_html}</tr>'
    title_html = f'<h2>{html.escape(title)}</h2><p>{html.escape(sentence)}</p>' if title else ''
    return (
        f'<section class="table" id="table-{name}">{title_html}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{html.escape(title or name)}"><table><thead><tr>{head_html}</tr></thead>'
        f'<tbody>{body_html}</tbody></table></div></section>'
    )


def render_cell(column: int, text: str) -> str:
    return f'<th scope="row">{html.escape(text)}</th>' if column == 0 else f'<td>{html.escape(text)}</td>'
