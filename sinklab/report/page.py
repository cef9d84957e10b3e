"""report.html: one file that needs no network.

Drawn by a few hundred lines of our own in assets/: a library of plots weighs 4.6 MB a page, has a slider for each
figure and nothing for a screen reader; here tables and titles are HTML, and stand there where no script runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sinklab.escape import escape_html
from sinklab.files.whole import whole
from sinklab.measure.emergence import Span
from sinklab.measure.table import HEADLINE
from sinklab.report import claims, closing, maps, sweep
from sinklab.report.answer import answer
from sinklab.report.arms import Arm, arms, table
from sinklab.report.content import content
from sinklab.report.emergence import span
from sinklab.report.lines import points
from sinklab.report.runs import NUMBERS, Run

ASSETS = Path(__file__).parent / 'assets'
SCRIPTS = ('unpack.js', 'colours.js', 'lines.js', 'panels.js', 'maps.js', 'controls.js', 'start.js')
NOTHING = ('', '-', ('-', ''))
SHOWN = 12  # runs whose table is open
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
OURS = (
    'Ours, as mean ± sample standard deviation over n seeds; beneath it what was published, at its own size. The '
    ' direction compares the difference from the first row with the published one.'
)

# Shown by a script where a table is wider than its frame.
HINT = '<p class="hint" hidden>More columns: scroll the table sideways &#8594;</p>'


def write(path: Path, runs: list[Run], as_paper: bool = False, claimed: Sequence[dict] = ()) -> None:
    """`claimed` are the entries of report/claims.py, where runs were made for them."""
    found = arms(runs)
    rows = table(found)
    figures, packed = content(found, rows, as_paper)
    with whole(path) as unfinished:
        unfinished.write_text(page(found, rows, figures, packed, claimed), encoding='utf-8')


def page(found: list[Arm], rows: list[dict], figures: list[dict], packed: str, claimed: Sequence[dict] = ()) -> str:
    runs = [run for arm in found for run in arm.runs]
    title = f'Attention sinks: {named([arm.name for arm in found])}'
    body = [
        f'<h1>{escape_html(title)}</h1>',
        f'<p class="answer">{escape_html(answer(found))}</p>',
        '<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>',
        asset('controls.html'),
        f'<main>{by_claim(claimed)}{by_row(found, rows)}{by_run(runs, found)}',
        f'{"".join(map(section, figures))}{kept(runs)}</main>',
        f'<script type="application/octet-stream" id="packed">{packed}</script>',
        f'<script>"use strict";{"".join(map(asset, SCRIPTS))}</script>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape_html(title)}</title>'
        f'<style>{asset("page.css")}</style></head><body>{"".join(body)}</body></html>'
    )


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')


def named(names: list[str], most: int = 4) -> str:
    return ', '.join(names) if len(names) <= most else f'{", ".join(names[:most])} and {len(names) - most} more'


def section(figure: dict) -> str:
    name = escape_html(figure['name'])
    lacking = f' Without it: {named(figure["without"])}.' if figure.get('without') else ''
    if 'runs' in figure:
        lacking += f' Of {figure["runs"]} runs.' if figure['runs'] > 1 else ''
    return (
        f'<section class="figure" id="figure-{name}" aria-labelledby="title-{name}">'
        f'<h2 id="title-{name}">{escape_html(figure["title"])}</h2><p>{escape_html(figure["sentence"] + lacking)}</p>'
        '<div class="drawn"></div><details class="values"><summary>values</summary><div class="scroll"></div>'
        f'{HINT}</details></section>'
    )


def kept(runs: list[Run]) -> str:
    """By which rule less is drawn than the runs hold."""
    probes = max(len(run.probe_steps) for run in runs)
    words = (
        f'Of {len(runs)} runs: curves of at most {points(len(runs))} points, the smallest and largest value of equal '
        f'parts; {probes} probes of a run at most, at even distances; maps by 65,535 levels, matrices by 255, of the '
        f'{maps.HEADS} strongest heads of {maps.RUNS} runs at most.'
    )
    return f'<p class="note" id="kept">{words}</p>'


def by_claim(entries: Sequence[dict]) -> str:
    if not entries:
        return ''
    lines = [(None, [f'{entry["claim"]}: {entry["words"]}', *claims.cells(entry)[1:]]) for entry in entries]
    return block('claims', 'Claims', f'{claims.NOTE}. {claims.in_words(entries)}', list(claims.HEADINGS), lines)


def by_row(found: list[Arm], rows: list[dict]) -> str:
    spans = {arm.name: span(arm.counted) for arm in found}
    names = sweep.measures(rows)
    shown = [name for name in names if any(name in row['ours'] or name in row['published'] for row in rows)]
    heads = ['row', 'n', *map(sweep.label, shown), f'{HEADLINE.label} − {rows[0]["row"]}', 'direction', 'outcome']
    lines = [
        (at, [row['row'], counted(row), *(both(row, name, spans) for name in shown), *last(row)])
        for at, row in enumerate(rows)
    ]
    return block('rows', 'By row', OURS, heads, lines)


def counted(row: dict) -> int:
    """Of how many runs its numbers are."""
    return max((found['n'] for found in row['ours'].values()), default=0)


def both(row: dict, name: str, spans: Mapping[str, Span]) -> tuple[str, str]:
    """(ours, published); emergence as the steps between which the sinks of all seeds emerge."""
    published = row['published'].get(name)
    if name == sweep.EMERGES and spans[row['row']].runs:
        return spans[row['row']].cell(), '' if published is None else sweep.text(published)
    return sweep.cell(row['ours'].get(name)) or '-', '' if published is None else sweep.text(published)


def last(row: dict) -> list[str]:
    return [sweep.cell((row['difference'] or {}).get(HEADLINE.name)), row['direction'], row['outcome']]


def by_run(runs: list[Run], found: list[Arm]) -> str:
    entries, places = closing.table(runs), [arm.name for arm in found]
    lines = [(places.index(run.arm), closing.cells(entry)) for run, entry in zip(runs, entries, strict=True)]
    table = block('runs', '', '', closing.HEADINGS, lines)
    said = {run.name: [*run.notes, *filter(None, [run.ending.get('message')])] for run in runs}
    notes = ''.join(
        f'<p class="note">{escape_html(f"{name}: {note}")}</p>' for name, told in said.items() for note in told
    )
    is_open = ' open' if len(runs) <= SHOWN else ''
    return f'<details class="runs"{is_open}><summary>By run: {len(runs)}</summary>{table}{notes}</details>'


def block(name: str, title: str, sentence: str, heads: list[str], lines: list[tuple[int | None, list]]) -> str:
    """A table whose rows know their arm, in a frame that scrolls, without the columns in which nothing stands."""
    told = [at for at in range(len(heads)) if at == 0 or any(cells[at] not in NOTHING for _, cells in lines)]
    heads, lines = [heads[at] for at in told], [(arm, [cells[at] for at in told]) for arm, cells in lines]
    meanings = {number.label: number.sentence for number in NUMBERS}
    head = ''.join(
        f'<th scope="col" title="{escape_html(meanings.get(one, ""))}">{escape_html(one)}</th>' for one in heads
    )
    body = ''.join(f'<tr{of_arm(arm)}>{"".join(map(cell, range(len(cells)), cells))}</tr>' for arm, cells in lines)
    label = escape_html(title or name)
    above = f'<h2>{escape_html(title)}</h2><p>{escape_html(sentence)}</p>' if title else ''
    return (
        f'<section class="table" id="table-{name}">{above}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{label}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'</div>{HINT}</section>'
    )


def of_arm(arm: int | None) -> str:
    return '' if arm is None else f' data-arm="{arm}"'


def cell(at: int, value: object) -> str:
    if at == 0:
        return f'<th scope="row">{escape_html(value)}</th>'
    ours, published = value if isinstance(value, tuple) else (value, '')
    beneath = f'<small><span class="hidden">published </span>{escape_html(published)}</small>' if published else ''
    return f'<td>{escape_html(ours)}{beneath}</td>'
