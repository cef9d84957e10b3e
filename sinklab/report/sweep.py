"""A sweep as a table: ours against published, as mean and spread over seeds, and paired with the first row."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from sinklab.folder import Folder
from sinklab.measure.emergence import Span, emergence, middle, span
from sinklab.measure.measure import Number, fixed
from sinklab.measure.table import HEADLINE, NUMBERS, VALID_LOSS, number
from sinklab.report.interval import interval

COMPARED = [number.name for number in NUMBERS if number.sweep]
LOSS = VALID_LOSS.name
EMERGES = 'emergence/step'  # the middle of the two probes between which a run's sink emerges
AFTER, AT = 'emergence/after', 'emergence/at'  # these probes: the first of them is missing where there is none before
EMERGENCE = Number(EMERGES, 'emerges', 'Step at which the sink emerges.', 'step')
FAILING = 0.6  # of log V. The worst loss that was published of a run that trains is 0.50 of it, of 50,432 ids.
FAILURES = {'diverged', 'failed'}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row with all its seeds."""

    about: dict  # config, row, diff, published, source
    outcomes: dict[int, str]  # by seed: done, diverged, refused, crashed, to do
    reasons: dict[int, str]  # by seed, where an outcome has one
    numbers: dict[int, dict[str, float]]  # by seed, of the runs that are done


def newest(folder: Folder) -> dict[str, float]:
    """The last value of every number that a run recorded, and whether it fails (1) or not (0)."""
    last, vocabulary = folder.limits()
    return judged(folder.records(last, strict=True), vocabulary)


def judged(records: list[dict], vocabulary: int | None) -> dict[str, float]:
    numbers = {name: value for record in records for name, value in record.items()}
    probed = [record for record in records if HEADLINE.name in record]
    if emerged := emergence([one['step'] for one in probed], [one[HEADLINE.name] for one in probed]):
        after, at = emerged
        numbers |= {EMERGES: middle(*emerged), AT: at} | ({} if after is None else {AFTER: after})
    if LOSS in numbers and vocabulary:
        numbers['fails'] = float(has_failed(numbers[LOSS], vocabulary))
    return numbers


def has_failed(loss: float, vocabulary: int) -> bool:
    """Whether a run has failed that ended with this validation loss: it is not finite, or above 0.6 log V."""
    return not loss <= FAILING * math.log(vocabulary)


def table(arms: list[Arm]) -> list[dict]:
    """What each row is about, and its outcome, ours {name: spread}, and the difference from the first row."""
    first, *others = arms
    return [entry(first, None), *(entry(arm, first) for arm in others)]


def entry(arm: Arm, first: Arm | None) -> dict:
    measured = {name: values(arm, name) for name in names(arm)}
    return dict(
        arm.about,
        outcome=outcome(endings(arm), bool(arm.about['published'].get('fails'))),
        seeds=arm.outcomes,
        reasons=arm.reasons,
        ours={name: spread(list(found.values())) for name, found in measured.items() if found},
        difference=first and dict({'from': first.about['row']}, **differences(arm, first)),
    )


def names(arm: Arm) -> list[str]:
    """What is compared: the table's own, whatever else is published of the row, and the loss."""
    published = [name for name in arm.about['published'] if name != 'fails']  # stands in the outcome
    return list(dict.fromkeys([*COMPARED, *published, EMERGES, LOSS]))


def values(arm: Arm, name: str) -> dict[int, float]:
    return {seed: numbers[name] for seed, numbers in arm.numbers.items() if name in numbers}


def differences(arm: Arm, first: Arm) -> dict[str, dict]:
    """The spread of (this row - the first one) over the seeds that both have, and the 95 % interval of its mean."""
    found = {}
    for name in (HEADLINE.name, LOSS):
        ours, theirs = values(arm, name), values(first, name)
        if both := [ours[seed] - theirs[seed] for seed in ours if seed in theirs]:
            found[name] = spread(both) | dict(interval=interval(both))
    return found


def direction(row: dict, first: dict, name: str = HEADLINE.name) -> str:
    """Whether a row differs from the first one to the same side as published, and beyond its spread over seeds."""
    published = [one['published'].get(name) for one in (row, first)]
    ours = (row['difference'] or {}).get(name)
    if ours is None or None in published or published[0] == published[1]:
        return ''
    if ours['mean'] == 0 or (ours['sd'] is not None and abs(ours['mean']) <= ours['sd']):
        return 'within the spread' if ours['sd'] is not None else 'no difference'
    same = (ours['mean'] > 0) == (published[0] > published[1])
    return ('as published' if same else 'opposite') + (', one seed' if ours['n'] == 1 else '')


def spread(numbers: list[float]) -> dict[str, float | int | None]:
    """Mean and sample standard deviation; that of one number is unknown."""
    sd = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return dict(mean=float(np.mean(numbers)), sd=sd, n=len(numbers))


def endings(arm: Arm) -> list[str]:
    """The outcomes by seed; of a row that is published as failing, a run that is done may have failed, too."""
    fails = values(arm, 'fails') if arm.about['published'].get('fails') else {}
    return ['failed' if fails.get(seed) else ending for seed, ending in arm.outcomes.items()]


def outcome(outcomes: list[str], fails: bool) -> str:
    """How often each, and whether it is what was published."""
    kinds = dict.fromkeys(outcomes)
    words = ', '.join(f'{kind} {outcomes.count(kind)}/{len(outcomes)}' for kind in kinds)
    if not fails or not {'done', *FAILURES} & set(kinds):
        return words
    if set(kinds) == {'done'}:
        return 'trained, published: fails'
    return f'{words}, as published' if set(kinds) <= FAILURES else f'{words}, published: fails'


def find_number(name: str) -> Number | None:
    """Return how a number is shown, None of one that is not known."""
    return {LOSS: VALID_LOSS, EMERGES: EMERGENCE}.get(name) or number(name)


def label(name: str) -> str:
    entry = find_number(name)
    return entry.label if entry else name


def short_label(name: str) -> str:
    """Return the label of a number for a list of several, and for the contrast of a claim."""
    return 'loss' if name == LOSS else label(name)


def heading(name: str) -> str:
    """Return the label of a number with its unit."""
    entry = find_number(name)
    return entry.axis if entry else name


def spans(arms: list[Arm]) -> dict[str, Span]:
    """Return between which probes the sinks of a row's seeds emerge, of each row with a probe."""
    found = {}
    for arm in arms:
        probed = [one for one in arm.numbers.values() if HEADLINE.name in one]
        if probed:
            found[arm.about['row']] = span([(one.get(AFTER), one[AT]) if AT in one else None for one in probed])
    return found


def published_text(numbers: dict) -> str:
    """Published numbers, as a person reads them."""
    said = (
        short_label(name) if value is True else f'{short_label(name)} {text(value)}'
        for name, value in numbers.items()
    )
    return '  '.join(said)


def text(value: object) -> str:
    return fixed(value, 2) if isinstance(value, float) else str(value)


def cells(rows: list[dict], spans: Mapping[str, Span] | None = None) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of a table for people; a column in which nothing stands is left out.

    Args:
        rows: of `table`.
        spans: of `spans`; without it a sink emerges at the mean of the middles.
    """
    columns = {'row': [row['row'] for row in rows], 'runs': [str(done(row)) for row in rows]}
    for name in measures(rows):
        if name == EMERGES and spans is not None:
            columns[heading(name)] = [spans[row['row']].cell() if row['row'] in spans else '' for row in rows]
        else:
            columns[heading(name)] = [cell(row['ours'].get(name), row['published'].get(name)) for row in rows]
        if name == HEADLINE.name:
            apart = [(row['difference'] or {}).get(name) for row in rows]
            columns[f'{HEADLINE.label} - {rows[0]["row"]} ({HEADLINE.unit})'] = list(map(cell, apart))
    columns['end'] = [brief(row) for row in rows]
    kept = {heading: cells for heading, cells in columns.items() if any(cells)}
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def brief(row: dict) -> str:
    """Return the outcome of a row, and no count where all of its runs are done."""
    return 'done' if row['outcome'] == f'done {len(row["seeds"])}/{len(row["seeds"])}' else row['outcome']


def measures(rows: list[dict]) -> list[str]:
    """What is shown of some row: the usual numbers, and between them what else was published and is measured here."""
    others = dict.fromkeys(name for row in rows for name in row['ours'] if name not in (*COMPARED, EMERGES, LOSS))
    return [*COMPARED, *others, EMERGES, LOSS]


def shows_published(rows: list[dict]) -> bool:
    """Whether a cell of `cells` has a published number; that of emergence is not shown next to an interval."""
    shown = [name for name in measures(rows) if name != EMERGES]
    return any(row['published'].get(name) is not None for row in rows for name in shown)


def done(row: dict) -> int:
    return list(row['seeds'].values()).count('done')


def cell(ours: dict | None, theirs: object = None) -> str:
    """mean ± spread (published)."""
    spread = f' ± {ours["sd"]:.2f}' if ours and ours['sd'] is not None else ''
    mine = f'{fixed(ours["mean"], 2)}{spread}' if ours else ''
    return f'{mine or "-"} ({text(theirs)})' if theirs is not None else mine
