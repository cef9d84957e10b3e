"""Claims as comparisons of two metrics of runs, paired by seed, and the resulting verdicts."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Literal

import numpy as np
from scipy.special import bdtrc

from sinklab.errors import UserError, format_error, format_unknown_name
from sinklab.escape import escape_markdown
from sinklab.metrics import registry
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

VERDICTS = (
    'contradicted',
    'not seen',
    'diverged',
    'unsettled',
    'holds',
    'too few seeds',
    'not run',
    'not testable here',
)
DECIDED_VERDICTS = ('holds', 'contradicted', 'not seen', 'unsettled')  # of `decide_verdict`
FAILS_METRIC = 'fails'  # 0 or 1
OTHER_METRICS = (LOSS_METRIC, FAILS_METRIC, EMERGENCE_METRIC)  # metrics outside the metric registry
INTERVAL_NOTE = f'mean difference of paired seeds and its interval ({INTERVAL_DESCRIPTION})'
CLAIM_HEADINGS = ('claim', 'published', 'here', 'n', 'verdict')
BRIEF_HEADINGS = ('claim', 'unit', 'paper', 'here', 'seeds', 'verdict')
LEGEND = (
    'claim: --list prints the statement of each; paper: the published difference; here: the mean difference between '
    'the two runs of a seed [its 95 % interval, widened because claims may be judged twice, after '
    f'{LOOK_SEEDS[0]} and after {LOOK_SEEDS[1]} seeds]; share: share of runs that fail; holds, contradicted: the '
    'interval is on the claimed or on the other side of 0; not seen: every difference in the interval is smaller '
    'than the smallest that counts; unsettled, ~N: in a new experiment, about N seeds '
    f'would settle the claim in half of all cases; too few seeds: fewer than {MIN_SAMPLES}, which get no interval'
)
UNIT_OF_METRIC = {LOSS_METRIC: registry.VALID_LOSS.unit, FAILS_METRIC: 'share', EMERGENCE_METRIC: 'steps'}
# The wording and the order of verdicts in the line of counts, the best verdict first.
VERDICT_PHRASES = {
    'holds': 'hold',
    'contradicted': 'contradicted',
    'not seen': 'not seen',
    'diverged': 'diverged',
    'unsettled': 'unsettled',
    'too few seeds': 'with too few seeds',
    'not testable here': 'not testable here',
    'not run': 'not run',
}
MIN_SIGN_TEST_CLAIMS = 5  # with fewer, p is at least 0.06
SAME_SHARE = 0.2  # of `min_difference`: 1 percentage point, or 0.004 nats
COMPARISON_WORDS = {'>': 'more than', '<': 'less than', '=': 'as much as'}


@dataclasses.dataclass(frozen=True)
class Reading:
    """A metric of a run, read at the end of the run or before its first step."""

    row: str  # TABLE:ROW
    metric: str
    when: Literal['end', 'start'] = 'end'

    def __str__(self) -> str:
        return f'{get_short_label(self.metric)} of {self.row}' + (' before training' if self.when == 'start' else '')


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that compares two readings.

    Attributes:
        statement: The claim in one sentence.
        source: The publication that makes the claim.
        left: The first reading. None if the claim cannot be tested.
        relation: What is claimed: `left` is more than (>), less than (<) or as much as (=) `right`.
        right: The second reading. None if the claim cannot be tested.
        min_difference: The smallest difference that counts, in the unit of the metric.
        untestable_reason: The reason why the claim cannot be tested; empty if it can.
    """

    statement: str
    source: str
    left: Reading | None = None
    relation: Literal['>', '<', '='] = '>'
    right: Reading | None = None
    min_difference: float = 0.0
    untestable_reason: str = ''

    @property
    def readings(self) -> list[Reading]:
        return [self.left, self.right] if self.left else []

    @property
    def comparison(self) -> str:
        return f'{self.left} {COMPARISON_WORDS[self.relation]} {self.right}' if self.left else ''


def read_claim_metrics(run_dir: RunDir, outcome: str, metric_patterns: set[str]) -> dict:
    """Read the outcome of a run and its metrics before the first step and at the end.

    Args:
        run_dir: The folder of the run.
        outcome: The outcome of the run, such as `done` or `diverged`.
        metric_patterns: The metrics to keep, as patterns such as `norm/ratio/*`. A metric that the run did not record
            is left out.

    Returns:
        The fields `outcome`, `start` and `end`, and `device` and `jax` of the last attempt. For any outcome but
        `done`, the only metric of `end` is `fails`, which is 1.

    Raises:
        DamagedFileError: config.json is damaged.
    """
    vocabulary, records = run_dir.read_json('config')['model']['vocabulary'], run_dir.read_records()
    first_metrics = compute_run_metrics([record for record in records if record['step'] == 0], None)
    last_metrics = compute_run_metrics(records, vocabulary) if outcome == 'done' else dict(fails=1.0)
    start, end = (
        {
            name: metrics[name]
            for name in sorted(metrics)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in metric_patterns)
        }
        for metrics in (first_metrics, last_metrics)
    )
    environment = run_dir.read_environment()
    device = ', '.join(sorted({*environment.get('devices', [])}))
    jax_version = environment.get('versions', {}).get('jax') or ''
    return dict(outcome=outcome, start=start, end=end, device=device, jax=jax_version)


def parse_claims(definitions: Mapping[str, Mapping], size: str | None = None) -> dict[str, Claim]:
    """Parse the CLAIMS of a config file.

    Args:
        definitions: {name of the claim: fields of `Claim`}, where `left` and `right` are tuples of fields of
            `Reading`. The additional field `untestable_at`, {size: reason}, names sizes at which the claim cannot be
            tested.
        size: The size at which the claims are tested; None ignores `untestable_at`.

    Raises:
        UserError: CLAIMS is not a dict, or a claim is invalid.
    """
    if not isinstance(definitions, Mapping):
        raise UserError(f'CLAIMS is {definitions!r}; it must be a dict of claims by name; see configs/claims.py')
    return {name: parse_claim(name, fields, size) for name, fields in definitions.items()}


def parse_claim(name: str, fields: Mapping, size: str | None = None) -> Claim:
    try:
        fields = dict(fields)
        reason = dict(fields.pop('untestable_at', {})).get(size)
        readings = {side: Reading(*fields[side]) for side in ('left', 'right') if side in fields}
        parsed = Claim(**{**fields, **readings})
    except (TypeError, ValueError) as error:
        raise UserError(
            f'claim {name} is invalid: {fields!r} ({format_error(error)}); see configs/claims.py'
        ) from error
    if problem := find_claim_fault(parsed):
        raise UserError(f'claim {name}: {problem}; see configs/claims.py')
    return Claim(parsed.statement, parsed.source, untestable_reason=reason) if reason else parsed


def find_claim_fault(claim: Claim) -> str:
    """Return what is wrong with a claim, or an empty string if it is valid."""
    if not claim.left and not claim.right:
        return '' if claim.untestable_reason else 'it has neither "left" and "right" nor "untestable_reason"'
    if not claim.left or not claim.right:
        return 'it has only one of "left" and "right"'
    if claim.relation not in COMPARISON_WORDS:
        return f'its relation is {claim.relation!r}; it must be one of {", ".join(COMPARISON_WORDS)}'
    units = {get_metric_unit(reading.metric) for reading in claim.readings}
    if claim.left.metric != claim.right.metric and (len(units) > 1 or '' in units):
        return f'{claim.left.metric} and {claim.right.metric} are different kinds of metrics'
    if not claim.min_difference > 0:
        return f'its min_difference is {claim.min_difference!r}; it must be above 0'
    if claim.left == claim.right:
        return f'it compares {claim.left} with itself'
    return next(filter(None, map(find_reading_fault, claim.readings)), '')


def find_reading_fault(reading: Reading) -> str:
    if reading.when not in ('end', 'start'):
        return f'{reading.when!r} is not a time of a measurement; give end or start'
    if reading.metric not in OTHER_METRICS and not registry.find_metric_info(reading.metric):
        metric_names = [*OTHER_METRICS, *(metric_info.name for metric_info in registry.METRIC_INFOS)]
        return format_unknown_name(f'metric {reading.metric!r}', reading.metric, metric_names, 'metrics')
    return ''


def make_claims_table(
    claims: Mapping[str, Claim], runs: Mapping[str, dict], published: Mapping[str, dict]
) -> list[dict]:
    """Make an entry with the verdict of each claim.

    Args:
        claims: The claims by name.
        runs: {row: {seed: what `read_claim_metrics` returns}}.
        published: {row: {metric: published value}}.

    Returns:
        The entries in the order of VERDICTS, so contradicted claims come first.
    """
    entries = [make_claim_entry(name, claim, runs, published) for name, claim in claims.items()]
    return sorted(entries, key=lambda entry: VERDICTS.index(entry['verdict']))


def make_claim_entry(name: str, claim: Claim, runs: Mapping[str, dict], published: Mapping[str, dict]) -> dict:
    seed_differences = compute_claim_differences(claim, runs) if claim.left else {}
    values, num_diverged = list(seed_differences.values()), count_diverged(claim, runs, seed_differences)
    is_binary = bool(claim.left) and claim.left.metric == FAILS_METRIC
    interval = compute_difference_interval(values, is_binary)
    claim_verdict, reason = judge_claim(claim, values, interval, num_diverged), claim.untestable_reason
    failing_rows = list_failing_rows(claim, runs)
    if claim_verdict == 'not seen' and (no_room := explain_no_room_below(claim, runs)):
        claim_verdict, reason = 'not testable here', no_room
    elif claim_verdict in DECIDED_VERDICTS and failing_rows and get_unit(claim) == '%':  # about a sink
        claim_verdict, reason = 'not testable here', f'has runs that all fail to train: {", ".join(failing_rows)}'
    return dict(
        claim=name,
        statement=claim.statement,
        source=claim.source,
        comparison=claim.comparison,
        relation=claim.relation if claim.left else None,
        unit=get_unit(claim),
        published=get_published_difference(claim, published),
        can_have_either_sign=can_have_either_sign(claim) and not reason,
        min_difference=claim.min_difference if claim.left else None,
        differences=seed_differences,
        mean=float(np.mean(values)) if values else None,
        interval=interval,
        diverged=num_diverged,
        failing_rows=failing_rows,
        verdict=claim_verdict,
        seeds_needed=estimate_needed_seeds(values, claim.relation, claim.min_difference, is_binary)
        if claim_verdict == 'unsettled'
        else None,
        untestable_reason=reason,
    )


def get_unit(claim: Claim) -> str:
    """Return the unit of the difference, or an empty string if the metric registry has none."""
    return get_metric_unit(claim.left.metric) if claim.left else ''


def get_metric_unit(metric: str) -> str:
    metric_info = registry.find_metric_info(metric)
    return metric_info.unit if metric_info else ''


def can_have_either_sign(claim: Claim) -> bool:
    """Return whether the difference can have either sign.

    A sink that was absent before training cannot become weaker, and a row that never fails cannot fail less often.
    """
    return bool(claim.left) and claim.right.when == 'end' and claim.left.metric != FAILS_METRIC


def compute_claim_differences(claim: Claim, runs: Mapping[str, dict]) -> dict[str, float]:
    """Compute the difference of the readings by seed, for the seeds that have both values."""
    left_values, right_values = (get_reading_values(reading, runs) for reading in claim.readings)
    return {seed: left_values[seed] - right_values[seed] for seed in left_values if seed in right_values}


def get_reading_values(reading: Reading, runs: Mapping[str, dict]) -> dict[str, float]:
    value_of_seed = {seed: run[reading.when].get(reading.metric) for seed, run in runs.get(reading.row, {}).items()}
    return {seed: value for seed, value in value_of_seed.items() if value is not None}


def count_diverged(claim: Claim, runs: Mapping[str, dict], seed_differences: Mapping[str, float]) -> int:
    """Count the seeds that have no difference and at least one diverged run."""
    diverged_seeds = {
        seed
        for reading in claim.readings
        for seed, run in runs.get(reading.row, {}).items()
        if run['outcome'] == 'diverged'
    }
    return len(diverged_seeds - seed_differences.keys())


def list_failing_rows(claim: Claim, runs: Mapping[str, dict]) -> list[str]:
    """List the rows of a claim whose runs all fail to train; list none if the claim is about failures."""
    if not claim.left or claim.left.metric == FAILS_METRIC:
        return []
    return [
        row
        for row in dict.fromkeys(reading.row for reading in claim.readings)
        if runs.get(row) and all(run['end'].get(FAILS_METRIC) == 1 for run in runs[row].values())
    ]


def get_published_difference(claim: Claim, published: Mapping[str, dict]) -> float | None:
    """Return the published difference, or None if one of the two values is not published.

    The value before training counts as 0, because models of these claims have no sink before they are trained.
    """
    if not claim.left:
        return None
    left_value, right_value = (published.get(reading.row, {}).get(reading.metric) for reading in claim.readings)
    right_value = 0.0 if claim.right.when == 'start' else right_value
    return None if left_value is None or right_value is None else left_value - right_value


def judge_claim(claim: Claim, values: list[float], interval: Interval | None, num_diverged: int) -> str:
    """Return one of VERDICTS for a claim.

    Args:
        claim: The claim.
        values: The difference of each seed.
        interval: The confidence interval of the mean difference; None if there are too few values.
        num_diverged: The number of seeds without a difference because a run diverged.
    """
    if claim.untestable_reason:
        return 'not testable here'
    if interval is None:
        return 'diverged' if num_diverged else 'too few seeds' if values else 'not run'
    return decide_verdict(interval, float(np.mean(values)), claim.relation, claim.min_difference)


def explain_no_room_below(claim: Claim, runs: Mapping[str, dict]) -> str:
    """Explain why a claim that a percentage is lower cannot be tested; return an empty string if it can.

    The claim cannot be tested if the mean of the second reading is below the smallest difference that counts.
    """
    right_values = (
        [*get_reading_values(claim.right, runs).values()] if claim.relation == '<' and get_unit(claim) == '%' else []
    )
    if not right_values or (mean := float(np.mean(right_values))) >= claim.min_difference:
        return ''
    return f'{claim.right} is {mean:.1f} % on average, so it cannot fall by {claim.min_difference:g} points'


def compute_sign_test(entries: list[dict]) -> dict:
    """Compute a one-sided sign test over the claims whose difference can have either sign.

    Claims of equality, untestable claims, claims without an interval and mean differences of exactly 0 are left out.
    Claims with nearly the same differences count once, as those that compare the same baseline with rows without a
    sink.

    Returns:
        The number of claims, the number `as_claimed` whose mean difference is on the claimed side, the number
        `distinct` of claims without those that have nearly the same differences as an earlier one, the number
        `distinct_as_claimed` of these, and `p`, the probability that `distinct` throws of a fair coin give at least
        `distinct_as_claimed` heads; None if there are no claims.
    """
    counted_entries = select_directed(entries)
    distinct_entries = drop_same_differences(counted_entries)
    num_as_claimed, num_distinct = (
        sum(orient(entry, entry['mean']) > 0 for entry in group) for group in (counted_entries, distinct_entries)
    )
    return dict(
        claims=len(counted_entries),
        as_claimed=num_as_claimed,
        distinct=len(distinct_entries),
        distinct_as_claimed=num_distinct,
        p=float(bdtrc(num_distinct - 1, len(distinct_entries), 0.5)) if distinct_entries else None,
    )


def select_directed(entries: list[dict]) -> list[dict]:
    """Select the entries that the sign test counts."""
    return [
        entry
        for entry in entries
        if entry['interval'] and entry['can_have_either_sign'] and entry['relation'] != '=' and entry['mean']
    ]


def drop_same_differences(entries: list[dict]) -> list[dict]:
    """Return the entries without those that have nearly the same differences as an earlier one."""
    distinct_entries: list[dict] = []
    for entry in entries:
        if not any(has_same_differences(entry, other) for other in distinct_entries):
            distinct_entries.append(entry)
    return distinct_entries


def has_same_differences(entry: dict, other: dict) -> bool:
    """Return whether two claims have the same differences, up to SAME_SHARE of the smallest that counts."""
    if (entry['unit'], entry['min_difference']) != (other['unit'], other['min_difference']):
        return False
    if entry['differences'].keys() != other['differences'].keys():
        return False
    tolerance = SAME_SHARE * entry['min_difference']
    return all(
        abs(orient(entry, difference) - orient(other, other['differences'][seed])) <= tolerance
        for seed, difference in entry['differences'].items()
    )


def orient(entry: dict, difference: float) -> float:
    """Return a difference with its sign chosen so that the claimed side is positive."""
    return -difference if entry['relation'] == '<' else difference


def format_claim_cells(entry: dict) -> list[str]:
    """Format the cells of a claim under CLAIM_HEADINGS."""
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
    """Format the cells of a tested claim under BRIEF_HEADINGS, with a unit and few digits.

    Percentages have one digit after the point, steps have none, and other units have two.
    """
    unit = UNIT_OF_METRIC.get(claim.left.metric, entry['unit'])
    digits = 1 if unit == '%' else 0 if unit == 'steps' else 2
    values = format_signed(entry['published'], digits), format_mean_and_interval(entry, digits)
    return [entry['claim'], unit, *values, str(len(entry['differences'])), format_verdict(entry, is_brief=True)]


def format_counts(entries: list[dict]) -> str:
    """Format the number of claims with each verdict as one sentence."""
    verdicts = [entry['verdict'] for entry in entries]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICT_PHRASES if verdict in verdicts}
    phrases = VERDICT_PHRASES | ({'holds': 'holds'} if counts.get('holds') == 1 else {})
    texts = [f'{count} {phrases[verdict]}' for verdict, count in counts.items()]
    return f'{len(entries)} claim{"s" if len(entries) > 1 else ""}: {", ".join(texts)}.'


def format_verdict_names(entries: list[dict], verdict: str) -> list[str]:
    """Return one line with the names of the claims that have a verdict, or no line if there are none."""
    names = [entry['claim'] for entry in entries if entry['verdict'] == verdict]
    return [f'{verdict.capitalize()}: {", ".join(names)}.'] if names else []


def format_untestable(entries: list[dict]) -> list[str]:
    """Return one line with the claims that cannot be tested, by reason, or no line if there are none."""
    names_by_reason: dict[str, list[str]] = {}
    for entry in entries:
        if entry['verdict'] == 'not testable here':
            names_by_reason.setdefault(entry['untestable_reason'], []).append(entry['claim'])
    texts = [f'{", ".join(names)} ({reason})' for reason, names in names_by_reason.items()]
    return [f'Not testable here: {"; ".join(texts)}.'] if texts else []


def format_failing_rows(entries: list[dict]) -> list[str]:
    """Return one line with the rows whose runs all fail to train, or no line if there are none."""
    rows = dict.fromkeys(row for entry in entries for row in entry['failing_rows'])
    return [f'All runs of these rows fail to train: {", ".join(rows)}.'] if rows else []


def format_verdict(entry: dict, is_brief: bool = False) -> str:
    """Format the verdict with the estimated number of seeds needed and the number of diverged seeds.

    Args:
        entry: An entry of `make_claims_table`.
        is_brief: Use the short form for a narrow table.
    """
    diverged_text = f', {entry["diverged"]} diverged' if entry['diverged'] and entry['verdict'] != 'diverged' else ''
    seeds_text = ''
    if entry['verdict'] == 'unsettled':
        seeds = entry['seeds_needed'] and round_to_two_digits(entry['seeds_needed'])
        if is_brief:
            seeds_text = f', ~{seeds}' if seeds else f', >={MAX_SEEDS}'
        else:
            seeds_text = f' (about {seeds} seeds)' if seeds else f' ({MAX_SEEDS} seeds or more)'
    return entry['verdict'] + seeds_text + diverged_text


def round_to_two_digits(number: int) -> int:
    return int(float(f'{number:.1e}'))


def format_markdown(entries: list[dict]) -> str:
    """Format the claims table, the names of claims without runs, and the sign test as Markdown."""
    lines = [
        f'| claim | comparison | published | here, {INTERVAL_DESCRIPTION} | n | verdict |',
        '|---|---|---|---|---|---|',
    ]
    for entry in [entry for entry in entries if entry['verdict'] != 'not run']:
        _, published, here, n, verdict = format_claim_cells(entry)
        claim_text = f'`{entry["claim"]}`: {entry["statement"]} ({entry["source"]})'
        row_cells = [
            claim_text,
            entry['untestable_reason'] or entry['comparison'],
            published,
            here,
            '' if entry['untestable_reason'] else n,
            verdict,
        ]
        lines.append(f'| {" | ".join(map(escape_markdown, row_cells))} |')
    notes = [*format_failing_rows(entries), *format_verdict_names(entries, 'not run'), format_sign_test(entries)]
    return '\n\n'.join(['\n'.join(lines), *filter(None, notes)]) + '\n'


def format_sign_test(entries: list[dict]) -> str:
    """Format the sign test as a sentence; return an empty string below MIN_SIGN_TEST_CLAIMS distinct claims."""
    test = compute_sign_test(entries)
    if test['distinct'] < MIN_SIGN_TEST_CLAIMS:
        return ''
    counted_text = (
        f', counting nearly equal differences once: {test["distinct_as_claimed"]} of {test["distinct"]},'
        if test['distinct'] < test['claims']
        else ':'
    )
    return (
        f'Of {test["claims"]} claims that could have come out either way and have an interval, {test["as_claimed"]} '
        f'have a mean difference on the claimed side. Sign test{counted_text} p = {test["p"]:.2g}, one-sided (claims '
        'share runs, so they are not independent).'
    )
