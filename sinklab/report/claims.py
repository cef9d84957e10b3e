"""Claims as comparisons of two metrics of runs, paired by seed, and the resulting verdicts."""

import fnmatch
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np
from scipy.special import bdtrc

from sinklab.errors import UserError, format_unknown_name
from sinklab.metrics import registry
from sinklab.metrics.metric import format_fixed
from sinklab.report.statistics import (
    LOOK_SEEDS,
    MAX_SEEDS,
    MIN_SAMPLES,
    compute_difference_interval,
    decide_verdict,
    estimate_needed_seeds,
)
from sinklab.report.sweep_table import EMERGENCE_METRIC, LOSS_METRIC, compute_run_metrics, get_short_label
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
FAILS_METRIC = 'fails'  # 0 or 1
# Metrics outside the metric registry.
UNIT_OF_METRIC = {LOSS_METRIC: registry.VALID_LOSS.unit, FAILS_METRIC: 'share', EMERGENCE_METRIC: 'steps'}
CLAIM_HEADINGS = ('claim', 'unit', 'paper', 'here', 'seeds', 'verdict')
LEGEND = (
    'claim: --list prints the statement of each; paper: the published difference; here: the mean difference between '
    'the two runs of a seed [its 95 % interval, widened because claims may be judged twice, after '
    f'{LOOK_SEEDS[0]} and after {LOOK_SEEDS[1]} seeds]; share: share of runs that fail; holds, contradicted: the '
    'interval is on the claimed or on the other side of 0; not seen: every difference in the interval is smaller '
    'than the smallest that counts; unsettled (about N seeds): in a new experiment, N seeds '
    f'would settle the claim in half of all cases; too few seeds: fewer than {MIN_SAMPLES}, which get no interval'
)
MIN_SIGN_TEST_CLAIMS = 5  # with fewer, p is at least 0.06
SAME_SHARE = 0.2  # of `min_difference`: 1 percentage point, or 0.004 nats
COMPARISON_WORDS = {'>': 'more than', '<': 'less than', '=': 'as much as'}


class Reading(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A metric of a run, read at the end of the run or before its first step."""

    row: str  # TABLE:ROW
    metric: str
    when: Literal['end', 'start'] = 'end'

    def __str__(self) -> str:
        return f'{get_short_label(self.metric)} of {self.row}' + (' before training' if self.when == 'start' else '')


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim that compares two readings.

    Attributes:
        statement: The claim in one sentence.
        source: The publication that makes the claim.
        left: The first reading. None if the claim cannot be tested.
        relation: What is claimed: `left` is more than (>), less than (<) or as much as (=) `right`.
        right: The second reading. None if the claim cannot be tested.
        min_difference: The smallest difference that counts, in the unit of the metric.
        untestable_reason: The reason why the claim cannot be tested; empty if it can.
        untestable_at: {size: reason} for sizes at which the claim cannot be tested.
    """

    statement: str
    source: str
    left: Reading | None = None
    relation: Literal['>', '<', '='] = '>'
    right: Reading | None = None
    min_difference: float = 0.0
    untestable_reason: str = ''
    untestable_at: dict[str, str] = {}

    @property
    def readings(self) -> list[Reading]:
        return [self.left, self.right] if self.left and self.right else []

    @property
    def comparison(self) -> str:
        return f'{self.left} {COMPARISON_WORDS[self.relation]} {self.right}' if self.left else ''

    @property
    def unit(self) -> str:
        """The unit of the difference, or an empty string if it has none."""
        return get_metric_unit(self.left.metric) if self.left else ''


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
    vocabulary = run_dir.read_json('config')['model']['vocabulary']
    records = run_dir.read_records()
    start = compute_run_metrics([record for record in records if record['step'] == 0], None)
    end = compute_run_metrics(records, vocabulary) if outcome == 'done' else dict(fails=1.0)

    def select(metrics: dict) -> dict:
        names = {name for pattern in metric_patterns for name in fnmatch.filter(metrics, pattern)}
        return {name: metrics[name] for name in sorted(names)}

    environment = run_dir.read_environment()
    device = ', '.join(sorted({*environment.get('devices', [])}))
    jax_version = environment.get('versions', {}).get('jax') or ''
    return dict(outcome=outcome, start=select(start), end=select(end), device=device, jax=jax_version)


def parse_claims(definitions: Mapping[str, Mapping], size: str | None = None) -> dict[str, Claim]:
    """Parse the CLAIMS of a config file.

    Args:
        definitions: {name of the claim: fields of `Claim`}, where `left` and `right` are tuples of fields of
            `Reading`.
        size: The size at which the claims are tested; None ignores `untestable_at`.

    Raises:
        UserError: CLAIMS is not a dict, or a claim is invalid.
    """
    if not isinstance(definitions, Mapping):
        raise UserError(f'CLAIMS is {definitions!r}; it must be a dict of claims by name; see configs/claims.py')
    return {name: parse_claim(name, fields, size) for name, fields in definitions.items()}


def parse_claim(name: str, fields: Mapping, size: str | None) -> Claim:
    try:
        claim = msgspec.convert(fields, Claim)
    except msgspec.ValidationError as error:
        raise UserError(f'claim {name} is invalid: {error}; see configs/claims.py') from error
    if problem := find_claim_fault(claim):
        raise UserError(f'claim {name}: {problem}; see configs/claims.py')
    if reason := claim.untestable_at.get(size):
        return Claim(claim.statement, claim.source, untestable_reason=reason)
    return msgspec.structs.replace(claim, untestable_at={})


def find_claim_fault(claim: Claim) -> str:
    """Return what is wrong with a claim, or an empty string if it is valid."""
    if not claim.left and not claim.right:
        return '' if claim.untestable_reason else 'it has neither "left" and "right" nor "untestable_reason"'
    if not claim.left or not claim.right:
        return 'it has only one of "left" and "right"'
    for reading in claim.readings:
        if reading.metric not in UNIT_OF_METRIC and not registry.find_metric_info(reading.metric):
            names = [*UNIT_OF_METRIC, *(info.name for info in registry.METRIC_INFOS)]
            return format_unknown_name(f'metric {reading.metric!r}', reading.metric, names, 'metrics')
    units = {get_metric_unit(reading.metric) for reading in claim.readings}
    if claim.left.metric != claim.right.metric and (len(units) > 1 or '' in units):
        return f'{claim.left.metric} and {claim.right.metric} are different kinds of metrics'
    if not claim.min_difference > 0:
        return f'its min_difference is {claim.min_difference!r}; it must be above 0'
    return ''


def get_metric_unit(metric: str) -> str:
    metric_info = registry.find_metric_info(metric)
    return metric_info.unit if metric_info else UNIT_OF_METRIC.get(metric, '')


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
    """Make the entry of a claim in verdicts.json."""
    differences = compute_claim_differences(claim, runs) if claim.left else {}
    values = list(differences.values())
    mean = float(np.mean(values)) if values else None
    is_binary = bool(claim.left) and claim.left.metric == FAILS_METRIC
    interval = compute_difference_interval(values, is_binary)
    num_diverged = count_diverged(claim, runs, differences)
    failing_rows = list_failing_rows(claim, runs)
    reason = claim.untestable_reason
    seeds_needed = None
    if reason:
        verdict = 'not testable here'
    elif interval is None:
        verdict = 'diverged' if num_diverged else 'too few seeds' if values else 'not run'
    else:
        verdict = decide_verdict(interval, mean, claim.relation, claim.min_difference)
        if verdict == 'not seen':
            reason = explain_no_room_below(claim, runs)
        if not reason and failing_rows and claim.unit == '%':  # about a sink
            reason = f'has runs that all fail to train: {", ".join(failing_rows)}'
        if reason:
            verdict = 'not testable here'
        elif verdict == 'unsettled':
            seeds_needed = estimate_needed_seeds(values, claim.relation, claim.min_difference, is_binary)
    # A sink that was absent before training cannot become weaker, and a row that never fails cannot fail less often.
    can_have_either_sign = bool(claim.left) and claim.right.when == 'end' and not is_binary and not reason
    return dict(
        claim=name,
        statement=claim.statement,
        source=claim.source,
        comparison=claim.comparison,
        relation=claim.relation if claim.left else None,
        unit=claim.unit,
        published=get_published_difference(claim, published),
        can_have_either_sign=can_have_either_sign,
        min_difference=claim.min_difference if claim.left else None,
        differences=differences,
        mean=mean,
        interval=interval,
        diverged=num_diverged,
        failing_rows=failing_rows,
        verdict=verdict,
        seeds_needed=seeds_needed,
        untestable_reason=reason,
    )


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


def explain_no_room_below(claim: Claim, runs: Mapping[str, dict]) -> str:
    """Explain why a claim that a percentage is lower cannot be tested; return an empty string if it can.

    The claim cannot be tested if the mean of the second reading is below the smallest difference that counts.
    """
    if claim.relation != '<' or claim.unit != '%':
        return ''
    mean = float(np.mean(list(get_reading_values(claim.right, runs).values())))
    if mean >= claim.min_difference:
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
    counted = [
        entry
        for entry in entries
        if entry['interval'] and entry['can_have_either_sign'] and entry['relation'] != '=' and entry['mean']
    ]
    distinct: list[dict] = []
    for entry in counted:
        if not any(has_same_differences(entry, other) for other in distinct):
            distinct.append(entry)
    num_as_claimed, num_distinct = (
        sum(orient(entry, entry['mean']) > 0 for entry in group) for group in (counted, distinct)
    )
    return dict(
        claims=len(counted),
        as_claimed=num_as_claimed,
        distinct=len(distinct),
        distinct_as_claimed=num_distinct,
        p=float(bdtrc(num_distinct - 1, len(distinct), 0.5)) if distinct else None,
    )


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
    """Format the cells of a claim under CLAIM_HEADINGS.

    Percentages have one digit after the point, steps have none, and other units have two.
    """
    digits = {'%': 1, 'steps': 0}.get(entry['unit'], 2)
    values = format_signed(entry['published'], digits), format_mean_and_interval(entry, digits)
    return [entry['claim'], entry['unit'], *values, str(len(entry['differences'])), format_verdict(entry)]


def format_signed(value: float | None, digits: int = 2) -> str:
    return '' if value is None else format_fixed(value, digits, '+')


def format_mean_and_interval(entry: dict, digits: int = 2) -> str:
    limits = ', '.join(format_signed(limit, digits) for limit in entry['interval'] or ())
    return format_signed(entry['mean'], digits) + (f' [{limits}]' if limits else '')


def format_counts(entries: list[dict]) -> str:
    """Format the number of claims with each verdict as one sentence."""
    verdicts = [entry['verdict'] for entry in entries]
    ordered = sorted({*verdicts}, key=lambda verdict: (verdict != 'holds', VERDICTS.index(verdict)))
    phrases = {'holds': 'holds' if verdicts.count('holds') == 1 else 'hold', 'too few seeds': 'with too few seeds'}
    texts = [f'{verdicts.count(verdict)} {phrases.get(verdict, verdict)}' for verdict in ordered]
    return f'{len(entries)} claim{"s" if len(entries) > 1 else ""}: {", ".join(texts)}.'


def format_notes(entries: list[dict]) -> list[str]:
    """Format lines with the rows whose runs all fail, and with the claims that are not testable or not run."""
    failing_rows = dict.fromkeys(row for entry in entries for row in entry['failing_rows'])
    names_by_reason: dict[str, list[str]] = {}
    for entry in entries:
        if entry['verdict'] == 'not testable here':
            names_by_reason.setdefault(entry['untestable_reason'], []).append(entry['claim'])
    untestable = [f'{", ".join(names)} ({reason})' for reason, names in names_by_reason.items()]
    not_run = [entry['claim'] for entry in entries if entry['verdict'] == 'not run']
    return [
        *([f'All runs of these rows fail to train: {", ".join(failing_rows)}.'] if failing_rows else []),
        *([f'Not testable here: {"; ".join(untestable)}.'] if untestable else []),
        *([f'Not run: {", ".join(not_run)}.'] if not_run else []),
    ]


def format_verdict(entry: dict) -> str:
    """Format the verdict with the estimated number of seeds needed and the number of diverged seeds."""
    text = entry['verdict']
    if text == 'unsettled':
        seeds = entry['seeds_needed'] and int(float(f'{entry["seeds_needed"]:.1e}'))
        text += f' (about {seeds} seeds)' if seeds else f' ({MAX_SEEDS} seeds or more)'
    return text + (f', {entry["diverged"]} diverged' if entry['diverged'] and text != 'diverged' else '')


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
