"""The HTML report (report.html): one file that needs no network.

About 900 lines of JavaScript in assets/ draw the figures. Plotly would add 4.6 MB to each page, has a
separate slider for each figure and does not support screen readers. Tables and titles are plain HTML, so they are
visible without JavaScript.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from sinklab.errors import format_names
from sinklab.metrics.emergence import EmergenceSpan
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.report import (
    claims,
    figure_data,
    summary_table,
    sweep_table,
)
from sinklab.report.emergence import compute_span
from sinklab.report.run_groups import RunGroup, group_runs, make_group_table
from sinklab.report.runs import MAX_FILES, RUN_METRIC_INFOS, RunResult
from sinklab.storage.files import atomic_write

ASSETS_DIR = Path(__file__).parent / 'assets'
SCRIPTS = ('unpack.js', 'utils.js', 'colours.js', 'lines.js', 'panels.js', 'maps.js', 'controls.js', 'main.js')
EMPTY_CELLS = ('', '-', ('-', ''))
MAX_OPEN_RUNS = 12  # with more runs, the table by run is collapsed at first
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)
ROWS_SENTENCE = (
    'Results as mean ± sample standard deviation over n seeds; below them published values, at their own size. The'
    ' direction compares the difference from the first row with the published one.'
)

# A script shows this hint if a table is wider than its frame.
SCROLL_HINT = '<p class="hint" hidden>More columns: scroll the table sideways &#8594;</p>'


def write_report_page(
    path: Path, runs: list[RunResult], as_paper: bool = False, claim_entries: Sequence[dict] = ()
) -> None:
    """Write the HTML report of runs, replacing the file atomically.

    Args:
        path: The HTML file.
        runs: At least one run.
        as_paper: Add published values to the figures, and sort and title the figures as in the paper.
        claim_entries: The entries of `claims.make_claims_table`; empty if the runs do not belong to claims.
    """
    run_groups = group_runs(runs)
    rows = make_group_table(run_groups)
    figures, payload = figure_data.make_page_data(run_groups, rows, as_paper)
    with atomic_write(path) as unfinished:
        unfinished.write_text(render_page(run_groups, rows, figures, payload, claim_entries), encoding='utf-8')


def render_page(
    run_groups: list[RunGroup],
    rows: list[dict],
    figures: list[dict],
    payload: str,
    claim_entries: Sequence[dict] = (),
) -> str:
    """Render the HTML document with its tables, figures, styles and scripts."""
    runs = [run for run_group in run_groups for run in run_group.runs]
    title = f'Attention sinks: {format_names([run_group.name for run_group in run_groups])}'
    body = [
        f'<h1>{html.escape(title)}</h1>',
        f'<p class="headline">{html.escape(summary_table.format_headline(run_groups))}</p>',
        '<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>',
        read_asset('controls.html'),
        f'<main>{render_claims_table(claim_entries)}{render_rows_table(run_groups, rows)}',
        render_runs_table(runs, run_groups),
        f'{"".join(map(render_figure, figures))}{render_limits_note(runs)}</main>',
        f'<script type="application/octet-stream" id="payload">{payload}</script>',
        f'<script>"use strict";{"".join(map(read_asset, SCRIPTS))}</script>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
        f'<title>{html.escape(title)}</title><style>{read_asset("page.css")}</style></head><body>{"".join(body)}</body></html>'
    )


def read_asset(name: str) -> str:
    return (ASSETS_DIR / name).read_text(encoding='utf-8')


def render_figure(figure: dict) -> str:
    name = html.escape(figure['name'])
    note = f' Missing in: {format_names(figure["missing_runs"])}.' if figure.get('missing_runs') else ''
    note += f' From {figure["num_runs"]} runs.' if figure.get('num_runs', 1) > 1 else ''
    return (
        f'<section class="figure" id="figure-{name}" aria-labelledby="title-{name}">'
        f'<h2 id="title-{name}">{html.escape(figure["title"])}</h2><p>{html.escape(figure["sentence"] + note)}</p>'
        '<div class="plot"></div><details class="values"><summary>values</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="values"></div>{SCROLL_HINT}</details></section>'
    )


def render_limits_note(runs: list[RunResult]) -> str:
    """Render the note on the limits by which the figures leave out data."""
    count_text = '1 run' if len(runs) == 1 else f'{len(runs)} runs'
    max_points = figure_data.choose_max_points(len(runs))
    map_levels, matrix_levels = (figure_data.MAX_LEVEL[dtype] + 1 for dtype in ('u2', 'u1'))
    text = (
        f'{count_text}: curves with at most {max_points} points, the smallest and largest value of equal parts; '
        f'at most {MAX_FILES:,} probes of all runs together, evenly spaced; maps with {map_levels:,} levels; '
        f'matrices with {matrix_levels}, for the {figure_data.MAX_MATRIX_HEADS} strongest heads of '
        f'{figure_data.MAX_MATRIX_RUNS} runs at most.'
    )
    return f'<p class="note">{text}</p>'


def render_claims_table(entries: Sequence[dict]) -> str:
    if not entries:
        return ''
    table_rows = [
        (None, [f'{entry["claim"]}: {entry["statement"]}', *claims.format_claim_cells(entry)[1:]])
        for entry in entries
    ]
    return render_table(
        'claims',
        'Claims',
        f'{claims.INTERVAL_NOTE}. {claims.format_sign_test(entries)}',
        list(claims.CLAIM_HEADINGS),
        table_rows,
    )


def render_rows_table(run_groups: list[RunGroup], rows: list[dict]) -> str:
    spans = {run_group.name: compute_span(run_group.counted_runs) for run_group in run_groups}
    names = sweep_table.list_shown_metrics(rows)
    shown_names = [name for name in names if any(name in row['ours'] or name in row['published'] for row in rows)]
    headings = [
        'row',
        'n',
        *map(sweep_table.get_label, shown_names),
        f'{HEADLINE_METRIC.label} − {rows[0]["row"]}',
        'direction',
        'outcome',
    ]
    table_rows = [
        (
            index,
            [
                row['row'],
                count_runs(row),
                *(make_metric_cell(row, name, spans) for name in shown_names),
                *make_comparison_cells(row),
            ],
        )
        for index, row in enumerate(rows)
    ]
    return render_table('rows', 'By row', ROWS_SENTENCE, headings, table_rows)


def count_runs(row: dict) -> int:
    """Return the largest number of runs behind a metric of a row."""
    return max((stats['n'] for stats in row['ours'].values()), default=0)


def make_metric_cell(row: dict, name: str, spans: Mapping[str, EmergenceSpan]) -> tuple[str, str]:
    """Return (own value, published value); emergence is shown as the interval of steps over all seeds."""
    published = row['published'].get(name)
    if name == sweep_table.EMERGENCE_METRIC and spans[row['row']].num_runs:
        return spans[row['row']].format_cell(), '' if published is None else sweep_table.format_number(published)
    return sweep_table.format_cell(
        row['ours'].get(name)
    ) or '-', '' if published is None else sweep_table.format_number(published)


def make_comparison_cells(row: dict) -> list[str]:
    return [
        sweep_table.format_cell((row['difference'] or {}).get(HEADLINE_METRIC.name)),
        row['direction'],
        row['outcome'],
    ]


def render_runs_table(runs: list[RunResult], run_groups: list[RunGroup]) -> str:
    entries, group_names = summary_table.make_run_table(runs), [run_group.name for run_group in run_groups]
    table_rows = [
        (group_names.index(run.group_name), summary_table.format_run_cells(entry))
        for run, entry in zip(runs, entries, strict=True)
    ]
    table = render_table('runs', '', '', summary_table.RUN_HEADINGS, table_rows)
    notes_of_run = {run.name: [*run.notes, *filter(None, [run.outcome_record.get('message')])] for run in runs}
    notes = ''.join(
        f'<p class="note">{html.escape(f"{name}: {note}")}</p>'
        for name, run_notes in notes_of_run.items()
        for note in run_notes
    )
    is_open = ' open' if len(runs) <= MAX_OPEN_RUNS else ''
    return f'<details class="runs"{is_open}><summary>By run: {len(runs)}</summary>{table}{notes}</details>'


def render_table(
    name: str, title: str, sentence: str, headings: list[str], table_rows: list[tuple[int | None, list]]
) -> str:
    """Render an HTML table in a scrollable frame, without its empty columns.

    Args:
        name: The suffix of the id of the section.
        title: The title, or an empty string for neither title nor sentence.
        sentence: The paragraph under the title.
        headings: The headings of the columns.
        table_rows: (index of the run group or None, cells) of each row. A cell may be (own value, published value).
    """
    column_indices = [
        column
        for column in range(len(headings))
        if column == 0 or any(cells[column] not in EMPTY_CELLS for _, cells in table_rows)
    ]
    headings, table_rows = (
        [headings[column] for column in column_indices],
        [(group_index, [cells[column] for column in column_indices]) for group_index, cells in table_rows],
    )
    meanings = {metric_info.label: metric_info.description for metric_info in RUN_METRIC_INFOS}
    head_html = ''.join(
        f'<th scope="col" title="{html.escape(meanings.get(heading, ""))}">{html.escape(heading)}</th>'
        for heading in headings
    )
    body_html = ''.join(
        f'<tr{format_group_attribute(group_index)}>{"".join(map(render_cell, range(len(cells)), cells))}</tr>'
        for group_index, cells in table_rows
    )
    label = html.escape(title or name)
    title_html = f'<h2>{html.escape(title)}</h2><p>{html.escape(sentence)}</p>' if title else ''
    return (
        f'<section class="table" id="table-{name}">{title_html}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{label}"><table><thead><tr>{head_html}</tr></thead><tbody>{body_html}</tbody></table>'
        f'</div>{SCROLL_HINT}</section>'
    )


def format_group_attribute(group_index: int | None) -> str:
    return '' if group_index is None else f' data-group="{group_index}"'


def render_cell(column: int, value: object) -> str:
    if column == 0:
        return f'<th scope="row">{html.escape(str(value))}</th>'
    own_value, published = value if isinstance(value, tuple) else (value, '')
    published_html = (
        f'<small><span class="hidden">published </span>{html.escape(published)}</small>' if published else ''
    )
    return f'<td>{html.escape(str(own_value))}{published_html}</td>'
