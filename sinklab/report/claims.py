"""Claims as contrasts of two numbers of runs, paired by seed, and what the runs say of them."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
from scipy.special import bdtrc

from sinklab.escape import escape_markdown
from sinklab.folder import Folder
from sinklab.measure import table as measures
from sinklab.measure.measure import fixed
from sinklab.record import Refusal, unknown
from sinklab.report.interval import FEWEST
from sinklab.report.sweep import EMERGES, LOSS, judged, short_label
from sinklab.report.verdict import LOOKS, MOST, OVER, Bounds, bounds, needed, verdict

VERDICTS = ('contradicted', 'not seen', 'diverged', 'unsettled', 'holds', 'not run', 'not testable here')
FAILS = 'fails'  # 0 or 1
OTHERS = (LOSS, FAILS, EMERGES)  # numbers that are no measure
NOTE = f'mean difference of paired seeds and its interval ({OVER})'
HEADINGS = ('claim', 'published', 'here', 'n', 'verdict')
BRIEF = ('claim', 'unit', 'paper', 'here', 'seeds', 'verdict')
LEGEND = (
    'claim: --list prints the sentence of each; paper: the published difference; here: the mean difference between '
    'the two runs of a seed [its 95 % interval, widened because claims may be judged twice, after '
    f'{LOOKS[0]} and after {LOOKS[1]} seeds]; share: share of runs that fail; holds, contradicted: the interval lies '
    'on the claimed or on the other side of 0; not seen: every difference in the interval is smaller than the least '
    'that the claim asks for; unsettled, ~N: the claim needs about N seeds'
)
UNITS = {LOSS: measures.VALID_LOSS.unit, FAILS: 'share', EMERGES: 'steps'}
# Verdicts as a count of them says them, the best first.
COUNTED = {
    'holds': 'hold',
    'contradicted': 'contradicted',
    'not seen': 'not seen',
    'diverged': 'diverged',
    'unsettled': 'unsettled',
    'not testable here': 'not testable here',
    'not run': 'not run',
}
WORDS = {'>': 'more than', '<': 'less than', '=': 'as much as'}


@dataclasses.dataclass(frozen=True)
class Reading:
    """A number of a run, at its end or before its first step."""

    row: str  # TABLE:ROW
    number: str
    at: Literal['end', 'start'] = 'end'

    def __str__(self) -> str:
        return f'{short_label(self.number)} of {self.row}' + (' before training' if self.at == 'start' else '')


@dataclasses.dataclass(frozen=True)
class Claim:
    """`of` is `way` than `than`; differences below `least` do not count. `why`: what keeps it from being tested."""

    words: str
    source: str
    of: Reading | None = None
    way: Literal['>', '<', '='] = '>'
    than: Reading | None = None
    least: float = 0.0
    why: str = ''

    @property
    def readings(self) -> list[Reading]:
        return [self.of, self.than] if self.of else []

    @property
    def contrast(self) -> str:
        return f'{self.of} {WORDS[self.way]} {self.than}' if self.of else ''


def measured(folder: Folder, outcome: str, names: set[str]) -> dict:
    """How a run ended, and some of its numbers before the first step and at the end; one that diverged fails."""
    steps, vocabulary = folder.limits()
    records = folder.records(steps, strict=True)
    first = judged([record for record in records if record['step'] == 0], None)
    last = judged(records, vocabulary) if outcome == 'done' else dict(fails=1.0)
    start, end = ({name: found[name] for name in sorted(names & found.keys())} for found in (first, last))
    return dict(outcome=outcome, start=start, end=end)


def claims(given: Mapping[str, Mapping]) -> dict[str, Claim]:
    """Of a file's CLAIMS; raises Refusal."""
    if not isinstance(given, Mapping):
        raise Refusal(f'CLAIMS is {given!r}, and has to be a dict of claims by name; see configs/claims.py')
    return {name: claim(name, fields) for name, fields in given.items()}


def claim(name: str, fields: Mapping) -> Claim:
    try:
        readings = {side: Reading(*fields[side]) for side in ('of', 'than') if side in fields}
        found = Claim(**{**fields, **readings})
    except (TypeError, ValueError) as error:
        raise Refusal(f'claim {name} is {fields!r}, which is none ({error}); see configs/claims.py') from error
    if wrong := fault(found):
        raise Refusal(f'claim {name}: {wrong}; see configs/claims.py')
    return found


def fault(claim: Claim) -> str:
    """What keeps a contrast from being one."""
    if not claim.of and not claim.than:
        return '' if claim.why else 'it has neither of and than nor why'
    if not claim.of or not claim.than:
        return 'it has one of of and than without the other'
    if claim.way not in WORDS:
        return f'its way is {claim.way!r}, and has to be one of {", ".join(WORDS)}'
    if claim.of.number != claim.than.number and not (measures.number(claim.of.number) and unit(claim)):
        return f'{claim.of.number} and {claim.than.number} are not of one kind'
    if not claim.least > 0:
        return f'its least is {claim.least!r}, the smallest difference that counts, and has to be above 0'
    if claim.of == claim.than:
        return f'it compares {claim.of} with itself'
    return next(filter(None, map(reading_fault, claim.readings)), '')


def reading_fault(reading: Reading) -> str:
    if reading.at not in ('end', 'start'):
        return f'{reading.at!r} is no time of a reading; give end or start'
    if reading.number not in OTHERS and not measures.number(reading.number):
        known = [*OTHERS, *(number.name for number in measures.NUMBERS)]
        return unknown(f'number {reading.number!r}', reading.number, known, 'numbers')
    return ''


def table(claims: Mapping[str, Claim], runs: Mapping[str, dict], published: Mapping[str, dict]) -> list[dict]:
    """An entry for each claim, of {row: {seed: measured}} and {row: published numbers}; contradicted ones first."""
    entries = [entry(name, claim, runs, published) for name, claim in claims.items()]
    return sorted(entries, key=lambda entry: VERDICTS.index(entry['verdict']))


def entry(name: str, claim: Claim, runs: Mapping[str, dict], published: Mapping[str, dict]) -> dict:
    found = differences(claim, runs) if claim.of else {}
    values, lost = list(found.values()), diverged(claim, runs, found)
    binary = bool(claim.of) and claim.of.number == FAILS
    interval = bounds(values, binary)
    said, why = conclusion(claim, values, interval, lost), claim.why
    if said == 'not seen' and (why := nothing_to_lose(claim, runs)):
        said = 'not testable here'
    return dict(
        claim=name,
        words=claim.words,
        source=claim.source,
        contrast=claim.contrast,
        way=claim.way,
        unit=unit(claim),
        published=of_rows(claim, published),
        either=either(claim) and not why,
        least=claim.least,
        differences=found,
        mean=float(np.mean(values)) if values else None,
        interval=interval,
        diverged=lost,
        verdict=said,
        seeds_needed=needed(values, claim.way, claim.least, binary) if said == 'unsettled' else None,
        why=why,
    )


def unit(claim: Claim) -> str:
    """Of its difference; nothing where the table of measures has none."""
    entry = measures.number(claim.of.number) if claim.of else None
    return entry.unit if entry else ''


def either(claim: Claim) -> bool:
    """Whether its difference may be of either sign; what was not there before, or does not fail, cannot be less."""
    return bool(claim.of) and claim.than.at == 'end' and claim.of.number != FAILS


def differences(claim: Claim, runs: Mapping[str, dict]) -> dict[str, float]:
    """By seed, of the seeds that have both numbers."""
    ours, theirs = (values(reading, runs) for reading in claim.readings)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def values(reading: Reading, runs: Mapping[str, dict]) -> dict[str, float]:
    given = {seed: run[reading.at].get(reading.number) for seed, run in runs.get(reading.row, {}).items()}
    return {seed: value for seed, value in given.items() if value is not None}


def diverged(claim: Claim, runs: Mapping[str, dict], found: Mapping[str, float]) -> int:
    """How many seeds have no difference, and a run that diverged."""
    each = [runs.get(reading.row, {}).items() for reading in claim.readings]
    return len({seed for run in each for seed, one in run if one['outcome'] == 'diverged'} - found.keys())


def of_rows(claim: Claim, published: Mapping[str, dict]) -> float | None:
    """The published difference, where both numbers are; no model has a sink before it is trained."""
    if not claim.of:
        return None
    ours, theirs = (published.get(reading.row, {}).get(reading.number) for reading in claim.readings)
    theirs = 0.0 if claim.than.at == 'start' else theirs
    return None if ours is None or theirs is None else ours - theirs


def conclusion(claim: Claim, values: list[float], found: Bounds | None, lost: int) -> str:
    """One of VERDICTS, by the interval that their differences have."""
    if claim.why:
        return 'not testable here'
    if found is None:
        return 'diverged' if lost and len(values) < FEWEST else 'unsettled' if values else 'not run'
    return verdict(found, float(np.mean(values)), claim.way, claim.least)


def nothing_to_lose(claim: Claim, runs: Mapping[str, dict]) -> str:
    """Why a share cannot be seen to be less: there is none beside it."""
    theirs = [*values(claim.than, runs).values()] if claim.way == '<' and unit(claim) == '%' else []
    small = theirs and float(np.mean(theirs)) < claim.least
    return f'there is nothing to be less than: {claim.than} is {np.mean(theirs):.1f} % in the mean' if small else ''


def sign_test(entries: list[dict]) -> dict:
    """How many claims that may come out either way have come out as claimed, and how likely that is of coins."""
    counted = [entry for entry in entries if entry['interval'] and entry['either'] and entry['way'] != '=']
    signs = [side(entry) for entry in counted if entry['mean']]
    right = sum(sign > 0 for sign in signs)
    p = float(bdtrc(right - 1, len(signs), 0.5)) if signs else None
    return dict(claims=len(signs), as_published=right, p=p)


def side(entry: dict) -> float:
    """Above 0 where a mean difference is as claimed."""
    return -entry['mean'] if entry['way'] == '<' else entry['mean']


def cells(entry: dict) -> list[str]:
    """Under HEADINGS, as a person reads it."""
    return [entry['claim'], signed(entry['published']), ours(entry), str(len(entry['differences'])), said(entry)]


def signed(value: float | None, digits: int = 2) -> str:
    return '' if value is None else fixed(value, digits, '+')


def ours(entry: dict, digits: int = 2) -> str:
    bounds = ', '.join(signed(one, digits) for one in entry['interval'] or ())
    return signed(entry['mean'], digits) + (f' [{bounds}]' if bounds else '')


def brief_cells(entry: dict, claim: Claim) -> list[str]:
    """Return the cells of a claim that was tested, under BRIEF: with its unit, and as few digits as say something."""
    unit = UNITS.get(claim.of.number, entry['unit'])
    digits = 1 if unit == '%' else 0 if unit == 'steps' else 2
    values = signed(entry['published'], digits), ours(entry, digits)
    return [entry['claim'], unit, *values, str(len(entry['differences'])), said(entry, brief=True)]


def counts(entries: list[dict]) -> str:
    """Say how many claims have each verdict."""
    kinds = [entry['verdict'] for entry in entries]
    each = [f'{kinds.count(kind)} {COUNTED.get(kind, kind)}' for kind in COUNTED if kind in kinds]
    return f'{len(entries)} claims: {", ".join(each)}.'


def list_names(entries: list[dict], verdict: str) -> list[str]:
    """Name the claims with a verdict, in one line; no line where there is none."""
    names = [entry['claim'] for entry in entries if entry['verdict'] == verdict]
    return [f'{verdict.capitalize()}: {", ".join(names)}.'] if names else []


def said(entry: dict, brief: bool = False) -> str:
    """Return the verdict, about how many seeds would settle it, and how many runs have diverged."""
    lost = f', {entry["diverged"]} diverged' if entry['diverged'] and entry['verdict'] != 'diverged' else ''
    more = ''
    if entry['verdict'] == 'unsettled':
        seeds = entry['seeds_needed']
        if brief:
            more = f', ~{seeds}' if seeds else f', >={MOST}'
        else:
            more = f' (about {seeds} seeds)' if seeds else f' ({MOST} seeds or more)'
    return entry['verdict'] + more + lost


def markdown(entries: list[dict]) -> str:
    """The table and the sign test as a page has them."""
    lines = [f'| claim | contrast | published | here, {OVER} | n | verdict |', '|---|---|---|---|---|---|']
    for entry in [entry for entry in entries if entry['verdict'] != 'not run']:
        _, published, here, n, verdict = cells(entry)
        words = f'`{entry["claim"]}`: {entry["words"]} ({entry["source"]})'
        told = [words, entry['why'] or entry['contrast'], published, here, '' if entry['why'] else n, verdict]
        lines.append(f'| {" | ".join(map(escape_markdown, told))} |')
    return '\n\n'.join(['\n'.join(lines), *not_run(entries), in_words(entries)]) + '\n'


def not_run(entries: list[dict]) -> list[str]:
    return list_names(entries, 'not run')


def in_words(entries: list[dict]) -> str:
    test = sign_test(entries)
    if not test['claims']:
        return 'Sign test: no claim that could have come out either way has an interval yet.'
    return (
        f'Sign test: of {test["claims"]} claims that could have come out either way and have an interval, '
        f'{test["as_published"]} have a mean difference on the claimed side (p = {test["p"]:.1g}, one-sided; claims '
        'share runs, so they are not independent).'
    )
