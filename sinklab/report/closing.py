"""Closing tables of runs, the sentences below them, and what their columns mean."""

from collections.abc import Mapping, Sequence

from sinklab.measure import table as measures
from sinklab.measure.emergence import LEAST, Span, span
from sinklab.measure.emergence import emergence as of_rates
from sinklab.measure.measure import Number, fixed
from sinklab.measure.table import HEADLINE
from sinklab.report.emergence import emergence
from sinklab.report.runs import NUMBERS, Run

HEADINGS = ('run', *(number.label for number in NUMBERS), 'emerges (step)', 'first head', 'end')
SOURCE = 'published, of another model'
FEW = 6  # rows that a sentence names each
MORE = {
    'runs': 'How many are done, each with another seed.',
    'emerges': 'Steps between which Sink_1 passes half of its last value (at start: it has passed it before '
    f'training; none: its last value is below {LEAST:.0f} %; 3 of 8: so many runs end with a sink).',
    'first head': 'The first whose mean alpha_1 is above 0.3 from then on.',
}


def legend(headings: Sequence[str], numbers: Sequence[Number] = ()) -> str:
    """Say in one paragraph what columns with these headings, and units behind them, mean.

    Args:
        headings: those without a meaning here are passed over.
        numbers: what some of them are, beside what every run is measured by.
    """
    known = *measures.NUMBERS, *NUMBERS, *numbers
    sentences = {number.label: number.sentence for number in known} | MORE
    plain = [heading.partition(' (')[0] for heading in headings]
    if HEADLINE.label in plain and 'alpha_1' not in plain:
        plain.insert(plain.index(HEADLINE.label) + 1, 'alpha_1')
    return '; '.join(f'{name}: {small(sentences[name])}' for name in plain if name in sentences)


def small(sentence: str) -> str:
    """Return a sentence to follow a colon."""
    first, rest = sentence.rstrip('.')[:1], sentence.rstrip('.')[1:]
    return (first.lower() if rest[:1].islower() else first) + rest


def table(runs: list[Run]) -> list[dict]:
    """None where a number was never recorded, or no sink has emerged."""
    return [entry(run) for run in runs]


def entry(run: Run) -> dict:
    found = emergence(run)
    emerged = found and dict(after=found.after, at=found.at, head=found.head)
    return dict(
        arm=run.name,
        notes=run.notes,
        **{number.name: run.last(number.name) for number in NUMBERS},
        seed=run.seed,
        row=run.arm,
        outcome=run.kind,
        message=run.ending.get('message', ''),
        probes=len(run.folder.probes),
        emergence=emerged,
    )


def cells(row: dict) -> list[str]:
    """A row of it as a person reads it, under HEADINGS."""
    values = [(number, row[number.name]) for number in NUMBERS]
    return [row['arm'], *('-' if value is None else number.text(value) for number, value in values), *ends(row)]


def ends(row: dict) -> list[str]:
    """When a sink emerges, in which head first, and how the run has ended."""
    emerged, end = row['emergence'], row['outcome'] + ('' if row['probes'] else ', no probe')
    if not emerged:
        return ['-' if row[HEADLINE.name] is None else span([None]).cell(), '-', end]
    head = 'layer {} head {}'.format(*emerged['head']) if emerged['head'] else '-'
    return [span([(emerged['after'], emerged['at'])]).cell(), head, end]


def of_one(records: list[dict], published: Mapping[str, object]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table with a line for each number of one run.

    Args:
        records: of its metrics.jsonl.
        published: {name: number}, of its row.
    """
    last = {name: value for record in records for name, value in record.items()}
    shown = [number for number in NUMBERS if number.name in last and number.name not in ('step', 'seconds')]
    rows = []
    for number in shown:
        theirs = published.get(number.name)
        said = f'{theirs:.2f} {number.unit}'.rstrip() if isinstance(theirs, int | float) else ''
        rows.append([number.label, number.text(last[number.name]), said, number.sentence])
    headings = ['number', 'value', 'published', 'what it is']
    if any(said for _, _, said, _ in rows):
        return headings, rows
    return [*headings[:2], headings[3]], [[label, value, what] for label, value, _, what in rows]


def describe_published(row: Mapping, headings: Sequence[str]) -> str:
    """Say what is published of a row besides the numbers of its table, and where that is published.

    Args:
        row: its row.json.
        headings: of the table, as `of_one` returns them.

    Returns:
        A line, or '' where the table shows no published number and the row is not published as failing.
    """
    fails = bool((row.get('published') or {}).get('fails'))
    origin = [f'{row["source"]}, of another model'] if row.get('source') else []
    if fails:
        return f'published: fails{"".join(f" ({where})" for where in origin)}'
    return ''.join(f'published: {where}' for where in origin) if 'published' in headings else ''


def duration(record: dict) -> str:
    return f'{record["step"]} steps in {record["seconds"]:.0f} s'


def seen(records: list[dict]) -> tuple[float | None, str]:
    """Return what Sink_1 a run has ended with, and in words when it emerged."""
    probed = [record for record in records if HEADLINE.name in record]
    if not probed:
        return None, 'no probe'
    rates = [record[HEADLINE.name] for record in probed]
    found = of_rates([record['step'] for record in probed], rates)
    return rates[-1], span([found]).sentence()


def seen_of_rows(rows: Sequence[Mapping], spans: Mapping[str, Span]) -> dict[str, tuple[float | None, str]]:
    """Return the same of each row of a sweep, as the mean of its runs.

    Args:
        rows: of report/sweep.py:table.
        spans: of report/sweep.py:spans.
    """
    found = {}
    for row in rows:
        name, rate = row['row'], row['ours'].get(HEADLINE.name)
        found[name] = (None, row['outcome']) if rate is None else (rate['mean'], spans[name].sentence())
    return found


def published(rows: Mapping[str, Mapping]) -> tuple[dict[str, str], str]:
    """Return {row: its published Sink_1}, of the rows that have one, and in words where that comes from."""
    found = {name: row.get('published', {}).get(HEADLINE.name) for name, row in rows.items()}
    return {name: f'{fixed(rate, 1)} %' for name, rate in found.items() if isinstance(rate, int | float)}, SOURCE


def sentence(
    seen: Mapping[str, tuple[float | None, str]], expected: Mapping[str, str], source: str, page: object = None
) -> str:
    """Say in one sentence what was seen, what was expected, and where the page lies.

    Args:
        seen: {row: (Sink_1, words)}.
        expected: {row: its Sink_1 in words}.
        source: where the expected values come from.
        page: the file, if there is one.
    """
    said = []
    if len(seen) <= FEW:
        each = [
            f'{"unknown" if rate is None else f"{fixed(rate, 1)} %"} for {name} ({words})'
            for name, (rate, words) in seen.items()
        ]
        said.append(f'Seen: {HEADLINE.label} is {join(each)}')
        if awaited := [f'{words} for {name}' for name, words in expected.items() if name in seen]:
            said.append(f'expected: {join(awaited)} ({source})')
    return '; '.join([*said, *([f'page: {page}'] if page else [])])


def join(words: Sequence[str]) -> str:
    return ' and '.join(filter(None, [', '.join(words[:-1]), words[-1]]))
