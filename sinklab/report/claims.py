"""Claims as contrasts of two numbers of runs, paired by seed, and what the runs say of them."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
from scipy.special import bdtrc

from sinklab.escape import escape_markdown
from sinklab.metrics import registry as measures
from sinklab.metrics.metric import format_fixed
from sinklab.report.statistics import (
    INTERVAL_DESCRIPTION,
    LOOK_SEEDS,
    MAX_SEEDS,
    MIN_SAMPLES,
    Interval,
    compute_difference_interval,
    decide_verdict,
    estimate_needed_seeds,
)
from sinklab.report.sweep_table import (
    EMERGENCE_METRIC,
    LOSS_METRIC,
    compute_run_metrics,
    get_short_label,
)
from sinklab.run_dir import RunDir
from sinklab.schema import UserError, format_unknown_name

VERDICTS = ('contradicted', 'not seen', 'diverged', 'unsettled', 'holds', 'not run', 'not testable here')
FAILS_METRIC = 'fails'  # 0 or 1
OTHER_METRICS = (LOSS_METRIC, FAILS_METRIC, EMERGENCE_METRIC)  # numbers that are no measure
INTERVAL_NOTE = f'mean difference of paired seeds and its interval ({INTERVAL_DESCRIPTION})'
CLAIM_HEADINGS = ('claim', 'published', 'here', 'n', 'verdict')
BRIEF_HEADINGS = ('claim', 'unit', 'paper', 'here', 'seeds', 'verdict')
LEGEND = (
    'claim: --list prints the sentence of each; paper: the published difference; here: the mean difference between '
    'the two runs of a seed [its 95 % interval, widened because claims may be judged twice, after '
    f'{LOOK_SEEDS[0]} and after {LOOK_SEEDS[1]} seeds]; share: share of runs that fail; holds, contradicted: the interval lies '
    'on the claimed or on the other side of 0; not seen: every difference in the interval is smaller than the least '
    'that the claim asks for; unsettled, ~N: the claim needs about N seeds'
)
UNIT_OF_METRIC = {LOSS_METRIC: measures.VALID_LOSS.unit, FAILS_METRIC: 'share', EMERGENCE_METRIC: 'steps'}
# Verdicts as a count of them says them, the best first.
VERDICT_PHRASES = {
    'holds': 'hold',
    'contradicted': 'contradicted',
    'not seen': 'not seen',
    'diverged': 'diverged',
    'unsettled': 'unsettled',
    'not testable here': 'not testable here',
    'not run': 'not run',
}
COMPARISON_WORDS = {'>': 'more than', '<': 'less than', '=': 'as much as'}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A number of a run, at its end or before its first step."""

    row: str  # TABLE:ROW
    metric: str
    when: Literal['end', 'start'] = 'end'

    def __str__(self) -> str:
        return f'{get_short_label(self.metric)} of {self.row}' + (' before training' if self.when == 'start' else '')


@dataclasses.dataclass(frozen=True)
class Claim:
    """`of` is `way` than `than`; differences below `least` do not count. `why`: what keeps it from being tested."""

    words: str
    source: str
    of: Operand | None = None
    way: Literal['>', '<', '='] = '>'
    than: Operand | None = None
    least: float = 0.0
    why: str = ''

    @property
    def operands(self) -> list[Operand]:
        return [self.of, self.than] if self.of else []

    @property
    def contrast(self) -> str:
        return f'{self.of} {COMPARISON_WORDS[self.way]} {self.than}' if self.of else ''


def read_claim_metrics(run_dir: RunDir, outcome: str, metric_names: set[str]) -> dict:
    """How a run ended, and some of its numbers before the first step and at the end; one that diverged fails."""
    steps, vocabulary = run_dir.read_limits()
    records = run_dir.read_records(steps, strict=True)
    first_metrics = compute_run_metrics([record for record in records if record['step'] == 0], None)
    last_metrics = compute_run_metrics(records, vocabulary) if outcome == 'done' else dict(fails=1.0)
    start, end = (
        {name: metrics[name] for name in sorted(metric_names & metrics.keys())}
        for metrics in (first_metrics, last_metrics)
    )
    return dict(outcome=outcome, start=start, end=end)


def parse_claims(definitions: Mapping[str, Mapping]) -> dict[str, Claim]:
    """Of a file's CLAIMS; raises UserError."""
    if not isinstance(definitions, Mapping):
        raise UserError(f'CLAIMS is {definitions!r}, and has to be a dict of claims by name; see configs/claims.py')
    return {name: parse_claim(name, fields) for name, fields in definitions.items()}


def parse_claim(name: str, fields: Mapping) -> Claim:
    try:
        operands = {side: Operand(*fields[side]) for side in ('of', 'than') if side in fields}
        parsed = Claim(**{**fields, **operands})
    except (TypeError, ValueError) as error:
        raise UserError(f'claim {name} is {fields!r}, which is none ({error}); see configs/claims.py') from error
    if problem := find_claim_fault(parsed):
        raise UserError(f'claim {name}: {problem}; see configs/claims.py')
    return parsed


def find_claim_fault(claim: Claim) -> str:
    """What keeps a contrast from being one."""
    if not claim.of and not claim.than:
        return '' if claim.why else 'it has neither of and than nor why'
    if not claim.of or not claim.than:
        return 'it has one of of and than without the other'
    if claim.way not in COMPARISON_WORDS:
        return f'its way is {claim.way!r}, and has to be one of {", ".join(COMPARISON_WORDS)}'
    if claim.of.metric != claim.than.metric and not (measures.find_metric_info(claim.of.metric) and get_unit(claim)):
        return f'{claim.of.metric} and {claim.than.metric} are not of one kind'
    if not claim.least > 0:
        return f'its least is {claim.least!r}, the smallest difference that counts, and has to be above 0'
    if claim.of == claim.than:
        return f'it compares {claim.of} with itself'
    return next(filter(None, map(find_operand_fault, claim.operands)), '')


def find_operand_fault(operand: Operand) -> str:
    if operand.when not in ('end', 'start'):
        return f'{operand.when!r} is no time of a reading; give end or start'
    if operand.metric not in OTHER_METRICS and not measures.find_metric_info(operand.metric):
        metric_names = [*OTHER_METRICS, *(metric_info.name for metric_info in measures.METRIC_INFOS)]
        return format_unknown_name(f'number {operand.metric!r}', operand.metric, metric_names, 'numbers')
    return ''


def make_claims_table(
    claims: Mapping[str, Claim], runs: Mapping[str, dict], published: Mapping[str, dict]
) -> list[dict]:
    """An entry for each claim, of {row: {seed: measured}} and {row: published numbers}; contradicted ones first."""
    entries = [make_claim_entry(name, claim, runs, published) for name, claim in claims.items()]
    return sorted(entries, key=lambda entry: VERDICTS.index(entry['verdict']))


def make_claim_entry(name: str, claim: Claim, runs: Mapping[str, dict], published: Mapping[str, dict]) -> dict:
    seed_differences = compute_claim_differences(claim, runs) if claim.of else {}
    values, num_diverged = list(seed_differences.values()), count_diverged(claim, runs, seed_differences)
    is_binary = bool(claim.of) and claim.of.metric == FAILS_METRIC
    interval = compute_difference_interval(values, is_binary)
    claim_verdict, reason = judge_claim(claim, values, interval, num_diverged), claim.why
    if claim_verdict == 'not seen' and (reason := explain_untestable(claim, runs)):
        claim_verdict = 'not testable here'
    return dict(
        claim=name,
        words=claim.words,
        source=claim.source,
        contrast=claim.contrast,
        way=claim.way,
        unit=get_unit(claim),
        published=get_published_difference(claim, published),
        either=is_two_sided(claim) and not reason,
        least=claim.least,
        differences=seed_differences,
        mean=float(np.mean(values)) if values else None,
        interval=interval,
        diverged=num_diverged,
        verdict=claim_verdict,
        seeds_needed=estimate_needed_seeds(values, claim.way, claim.least, is_binary)
        if claim_verdict == 'unsettled'
        else None,
        why=reason,
    )


def get_unit(claim: Claim) -> str:
    """Of its difference; nothing where the table of measures has none."""
    metric_info = measures.find_metric_info(claim.of.metric) if claim.of else None
    return metric_info.unit if metric_info else ''


def is_two_sided(claim: Claim) -> bool:
    """Whether its difference may be of either sign; what was not there before, or does not fail, cannot be less."""
    return bool(claim.of) and claim.than.when == 'end' and claim.of.metric != FAILS_METRIC


def compute_claim_differences(claim: Claim, runs: Mapping[str, dict]) -> dict[str, float]:
    """By seed, of the seeds that have both numbers."""
    of_values, than_values = (get_operand_values(operand, runs) for operand in claim.operands)
    return {seed: of_values[seed] - than_values[seed] for seed in of_values if seed in than_values}


def get_operand_values(operand: Operand, runs: Mapping[str, dict]) -> dict[str, float]:
    value_of_seed = {seed: run[operand.when].get(operand.metric) for seed, run in runs.get(operand.row, {}).items()}
    return {seed: value for seed, value in value_of_seed.items() if value is not None}


def count_diverged(claim: Claim, runs: Mapping[str, dict], seed_differences: Mapping[str, float]) -> int:
    """How many seeds have no difference, and a run that diverged."""
    operand_runs = [runs.get(operand.row, {}).items() for operand in claim.operands]
    return len(
        {seed for run in operand_runs for seed, measured_run in run if measured_run['outcome'] == 'diverged'}
        - seed_differences.keys()
    )


def get_published_difference(claim: Claim, published: Mapping[str, dict]) -> float | None:
    """The published difference, where both numbers are; no model has a sink before it is trained."""
    if not claim.of:
        return None
    of_value, than_value = (published.get(operand.row, {}).get(operand.metric) for operand in claim.operands)
    than_value = 0.0 if claim.than.when == 'start' else than_value
    return None if of_value is None or than_value is None else of_value - than_value


def judge_claim(claim: Claim, values: list[float], interval: Interval | None, num_diverged: int) -> str:
    """One of VERDICTS, by the interval that their differences have."""
    if claim.why:
        return 'not testable here'
    if interval is None:
        return 'diverged' if num_diverged and len(values) < MIN_SAMPLES else 'unsettled' if values else 'not run'
    return decide_verdict(interval, float(np.mean(values)), claim.way, claim.least)


def explain_untestable(claim: Claim, runs: Mapping[str, dict]) -> str:
    """Why a share cannot be seen to be less: there is none beside it."""
    than_values = (
        [*get_operand_values(claim.than, runs).values()] if claim.way == '<' and get_unit(claim) == '%' else []
    )
    is_small = than_values and float(np.mean(than_values)) < claim.least
    return (
        f'there is nothing to be less than: {claim.than} is {np.mean(than_values):.1f} % in the mean'
        if is_small
        else ''
    )


def compute_sign_test(entries: list[dict]) -> dict:
    """How many claims that may come out either way have come out as claimed, and how likely that is of coins."""
    counted_entries = [entry for entry in entries if entry['interval'] and entry['either'] and entry['way'] != '=']
    signs = [orient_mean(entry) for entry in counted_entries if entry['mean']]
    num_as_claimed = sum(sign > 0 for sign in signs)
    p = float(bdtrc(num_as_claimed - 1, len(signs), 0.5)) if signs else None
    return dict(claims=len(signs), as_published=num_as_claimed, p=p)


def orient_mean(entry: dict) -> float:
    """Above 0 where a mean difference is as claimed."""
    return -entry['mean'] if entry['way'] == '<' else entry['mean']


def format_claim_cells(entry: dict) -> list[str]:
    """Under HEADINGS, as a person reads it."""
    return [
        entry['claim'],
        format_signed(entry['published']),
        format_mean_and_interval(entry),
        str(len(entry['differences'])),
        format_verdict(entry),
    ]


def format_signed(value: float | None, digits: int = 2) -> str:
    return '' if value is None else format_fixed(value, digits, '+')


def format_mean_and_interval(entry: dict, digits: int = 2) -> str:
    limits = ', '.join(format_signed(limit, digits) for limit in entry['interval'] or ())
    return format_signed(entry['mean'], digits) + (f' [{limits}]' if limits else '')


def format_brief_cells(entry: dict, claim: Claim) -> list[str]:
    """Return the cells of a claim that was tested, under BRIEF: with its unit, and as few digits as say something."""
    unit = UNIT_OF_METRIC.get(claim.of.metric, entry['unit'])
    digits = 1 if unit == '%' else 0 if unit == 'steps' else 2
    values = format_signed(entry['published'], digits), format_mean_and_interval(entry, digits)
    return [entry['claim'], unit, *values, str(len(entry['differences'])), format_verdict(entry, is_brief=True)]


def format_counts(entries: list[dict]) -> str:
    """Say how many claims have each verdict."""
    verdicts = [entry['verdict'] for entry in entries]
    texts = [
        f'{verdicts.count(verdict)} {VERDICT_PHRASES.get(verdict, verdict)}'
        for verdict in VERDICT_PHRASES
        if verdict in verdicts
    ]
    return f'{len(entries)} claims: {", ".join(texts)}.'


def format_verdict_names(entries: list[dict], verdict: str) -> list[str]:
    """Name the claims with a verdict, in one line; no line where there is none."""
    names = [entry['claim'] for entry in entries if entry['verdict'] == verdict]
    return [f'{verdict.capitalize()}: {", ".join(names)}.'] if names else []


def format_verdict(entry: dict, is_brief: bool = False) -> str:
    """Return the verdict, about how many seeds would settle it, and how many runs have diverged."""
    diverged_text = f', {entry["diverged"]} diverged' if entry['diverged'] and entry['verdict'] != 'diverged' else ''
    seeds_text = ''
    if entry['verdict'] == 'unsettled':
        seeds = entry['seeds_needed']
        if is_brief:
            seeds_text = f', ~{seeds}' if seeds else f', >={MAX_SEEDS}'
        else:
            seeds_text = f' (about {seeds} seeds)' if seeds else f' ({MAX_SEEDS} seeds or more)'
    return entry['verdict'] + seeds_text + diverged_text


def format_markdown(entries: list[dict]) -> str:
    """The table and the sign test as a page has them."""
    lines = [
        f'| claim | contrast | published | here, {INTERVAL_DESCRIPTION} | n | verdict |',
        '|---|---|---|---|---|---|',
    ]
    for entry in [entry for entry in entries if entry['verdict'] != 'not run']:
        _, published, here, n, verdict = format_claim_cells(entry)
        claim_text = f'`{entry["claim"]}`: {entry["words"]} ({entry["source"]})'
        row_cells = [
            claim_text,
            entry['why'] or entry['contrast'],
            published,
            here,
            '' if entry['why'] else n,
            verdict,
        ]
        lines.append(f'| {" | ".join(map(escape_markdown, row_cells))} |')
    return '\n\n'.join(['\n'.join(lines), *format_not_run(entries), format_sign_test(entries)]) + '\n'


def format_not_run(entries: list[dict]) -> list[str]:
    return format_verdict_names(entries, 'not run')


def format_sign_test(entries: list[dict]) -> str:
    test = compute_sign_test(entries)
    if not test['claims']:
        return 'Sign test: no claim that could have come out either way has an interval yet.'
    return (
        f'Sign test: of {test["claims"]} claims that could have come out either way and have an interval, '
        f'{test["as_published"]} have a mean difference on the claimed side (p = {test["p"]:.1g}, one-sided; claims '
        'share runs, so they are not independent).'
    )
