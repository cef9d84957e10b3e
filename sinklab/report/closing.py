"""The closing table of runs: a row a run."""

from sinklab.measure.emergence import between
from sinklab.report.emergence import emergence
from sinklab.report.runs import NUMBERS, Run

HEADINGS = ('arm', *(number.label for number in NUMBERS), 'emerges', 'first head', 'end')


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
        return ['-', '-', end]
    head = 'layer {} head {}'.format(*emerged['head']) if emerged['head'] else '-'
    return [between(emerged['after'], emerged['at']), head, end]
