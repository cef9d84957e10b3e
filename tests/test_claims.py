"""Verdicts of claims from intervals of paired differences."""

import dataclasses

import numpy as np
import pytest

from sinklab.cli import config_flags
from sinklab.cli.claims import collect_published_numbers, get_config_path
from sinklab.config.differences import flatten_dict
from sinklab.configs.claims import CLAIMS
from sinklab.metrics import registry
from sinklab.report import claims
from sinklab.report.claims import Claim, Reading
from sinklab.report.statistics import compute_difference_interval, decide_verdict, estimate_needed_seeds

MIN_DIFFERENCE = 5.0
SIGMOID, SOFTMAX = Reading('attention:sigmoid', 'sink/1'), Reading('attention:softmax', 'sink/1')


def make_claim(relation='<', **fields):
    return Claim('A.', 'source', SIGMOID, relation, SOFTMAX, MIN_DIFFERENCE, **fields)


def compute_verdict(values, relation):
    return decide_verdict(compute_difference_interval(values), np.mean(values), relation, MIN_DIFFERENCE)


WRONG_VERDICTS = {
    ('>', 0): {'holds', 'contradicted'},
    ('<', 0): {'holds', 'contradicted'},
    ('=', 0): {'contradicted'},
    ('>', 20): {'contradicted', 'not seen'},
    ('<', 20): {'holds', 'not seen'},
    ('=', 20): {'holds'},
    ('=', 4.5): {'contradicted'},
}


@pytest.mark.parametrize(('relation', 'true_difference'), WRONG_VERDICTS)
def test_wrong_verdict_rate_is_at_most_5_percent(relation, true_difference):
    """Draw skewed shares of two rows; use eight seeds where five leave a claim unsettled."""
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(2000):
        mean, concentration = rng.uniform(0.3, 0.9), 10 ** rng.uniform(0.5, 3.5)
        row_means = np.array([[mean], [mean - true_difference / 100]])
        shares = rng.beta(row_means * concentration, (1 - row_means) * concentration, (2, 8))
        difference_N = 100 * (shares[0] - shares[1])
        verdict = compute_verdict(difference_N[:5], relation)
        verdicts.append(compute_verdict(difference_N, relation) if verdict == 'unsettled' else verdict)
    assert np.isin(verdicts, [*WRONG_VERDICTS[relation, true_difference]]).mean() <= 0.05


@pytest.mark.parametrize(
    ('values', 'expected_if_more', 'expected_if_less', 'expected_if_equal'),
    [
        ([20, 21, 22, 23, 24], 'holds', 'contradicted', 'contradicted'),
        ([-20, -21, -22, -23, -24], 'contradicted', 'holds', 'contradicted'),
        ([0.5, -0.5, 0.2, 0.1, -0.2], 'not seen', 'not seen', 'holds'),
        ([1.0, 1.1, 1.2, 1.0, 1.1], 'not seen', 'not seen', 'holds'),  # above 0 and below the minimum
        ([0, 0, 0, 0, 0], 'not seen', 'not seen', 'holds'),
        ([40, -30, 50, -10, 20], 'unsettled', 'unsettled', 'unsettled'),
        ([4, 6, 8, 10, 12], 'holds', 'contradicted', 'unsettled'),  # possibly below the minimum
        ([20, 21, 20, 21], 'too few seeds', 'too few seeds', 'too few seeds'),
        ([], 'not run', 'not run', 'not run'),
    ],
)
def test_verdict_uses_interval_and_minimum_difference(values, expected_if_more, expected_if_less, expected_if_equal):
    runs = make_runs(
        {seed: 50.0 + value for seed, value in enumerate(values)}, dict.fromkeys(range(len(values)), 50.0)
    )
    verdicts = [make_entry(make_claim(relation), runs)['verdict'] for relation in '><=']
    assert verdicts == [expected_if_more, expected_if_less, expected_if_equal]


def make_runs(first_values, second_values, diverged_seeds=()):
    """Return {row: {seed: measurements}} of two rows; seeds in `diverged_seeds` diverged in the first row."""

    def make_row_runs(values, diverged_seeds=()):
        runs = {
            str(seed): dict(outcome='done', start={'sink/1': 0.0}, end={'sink/1': value})
            for seed, value in values.items()
        }
        return runs | {str(seed): dict(outcome='diverged', start={}, end={'fails': 1.0}) for seed in diverged_seeds}

    return {SIGMOID.row: make_row_runs(first_values, diverged_seeds), SOFTMAX.row: make_row_runs(second_values)}


def make_entry(claim, runs, published=None):
    return claims.make_claim_entry('name', claim, runs, published or {})


def test_claim_entry_uses_seeds_of_both_rows():
    first_values = {0: 1.0, 1: 2.0, 3: 5.0, 4: 0.0, 5: 10.0}
    second_values = {0: 51.0, 1: 42.0, 2: 7.0, 3: 65.0, 4: 40.0, 5: 60.0, 6: 50.0}
    entry = make_entry(make_claim(), make_runs(first_values, second_values))
    assert entry['differences'] == {'0': -50.0, '1': -40.0, '3': -60.0, '4': -40.0, '5': -50.0}
    assert entry['mean'] == -48
    assert entry['interval'] == compute_difference_interval([-50.0, -40.0, -60.0, -40.0, -50.0])
    assert entry['verdict'] == 'holds'


def test_claim_entry_counts_diverged_runs():
    five_values = {seed: 1.0 + seed for seed in range(5)}
    entry = make_entry(make_claim(), make_runs(five_values, dict.fromkeys(range(7), 50.0), diverged_seeds=(5, 6)))
    assert (entry['verdict'], entry['diverged']) == ('holds', 2)
    assert claims.format_verdict(entry) == 'holds, 2 diverged'
    entry = make_entry(make_claim(), make_runs({0: 1.0}, dict.fromkeys(range(5), 50.0), diverged_seeds=range(1, 5)))
    assert (entry['verdict'], entry['diverged']) == ('diverged', 4)
    failure_claim = Claim('A.', 'source', Reading(SIGMOID.row, 'fails'), '>', Reading(SOFTMAX.row, 'fails'), 0.5)
    runs = make_runs({}, dict.fromkeys(range(5), 50.0), diverged_seeds=range(5))
    for run in runs[SOFTMAX.row].values():
        run['end']['fails'] = 0.0
    entry = make_entry(failure_claim, runs)
    assert (entry['verdict'], entry['diverged'], entry['can_have_either_sign']) == ('holds', 0, False)


def test_claim_entry_has_difference_of_published_numbers():
    published = {SIGMOID.row: {'sink/1': 0.44}, SOFTMAX.row: {'sink/1': 18.18}}
    assert make_entry(make_claim(), {}, published)['published'] == pytest.approx(-17.74)
    assert make_entry(make_claim(), {}, {SIGMOID.row: {}})['published'] is None
    emergence_claim = Claim('A.', 'source', SOFTMAX, '>', Reading(SOFTMAX.row, 'sink/1', 'start'), MIN_DIFFERENCE)
    assert make_entry(emergence_claim, {}, published)['published'] == 18.18
    entry = make_entry(emergence_claim, make_runs({}, {0: 30.0, 1: 40.0, 2: 35.0, 3: 33.0, 4: 41.0}))
    assert (entry['verdict'], entry['can_have_either_sign']) == ('holds', False)


@pytest.mark.parametrize('values', [[40.0, -20.0, 10.0, -30.0, 50.0], [8.0, -1.0, 3.5, 9.0, -2.0, 3.5], [2.0] * 5])
def test_estimate_needed_seeds_matches_count_that_settles_verdict(values):
    """Repeat differences without skewness."""
    values = np.array(values) + [0.01, 0, 0, 0, -0.01, 0][: len(values)]
    count = estimate_needed_seeds(list(values), '>', MIN_DIFFERENCE)
    for num_repeats in range(1, 40):
        n = num_repeats * len(values)
        if n < 0.8 * count:
            assert compute_verdict(np.tile(values, num_repeats), '>') == 'unsettled'
        if n >= count:
            assert compute_verdict(np.tile(values, num_repeats), '>') != 'unsettled'
    assert estimate_needed_seeds([1e4, -1e4, 0.0, 1e4, -1e4], '>', MIN_DIFFERENCE) is None


@pytest.mark.parametrize(('failures', 'expected_verdicts'), [(0, ['unsettled', 'not seen']), (1, ['holds', 'holds'])])
def test_claim_entry_needs_more_than_five_seeds_without_failures(failures, expected_verdicts):
    """Check that no failures in seven seeds, but not in six, exclude a failure rate of one half."""
    failure_claim = Claim('A.', 'source', Reading(SIGMOID.row, 'fails'), '>', Reading(SOFTMAX.row, 'fails'), 0.5)

    def make_entry_of_seeds(count):
        runs = make_runs(dict.fromkeys(range(count), 1.0), dict.fromkeys(range(count), 1.0))
        for row, run in ((row, run) for row, seeds in runs.items() for run in seeds.values()):
            run['end']['fails'] = float(failures) if row == SIGMOID.row else 0.0
        return make_entry(failure_claim, runs)

    entry_of_five, entry_of_eight = make_entry_of_seeds(5), make_entry_of_seeds(8)
    assert [entry_of_five['verdict'], entry_of_eight['verdict']] == expected_verdicts
    assert entry_of_five['seeds_needed'] == (7 if failures == 0 else None)
    assert make_entry_of_seeds(7)['verdict'] == expected_verdicts[1]
    assert make_entry_of_seeds(6)['verdict'] == expected_verdicts[0]


def test_claim_entry_is_not_testable_if_reference_is_zero():
    zero_values, large_values = (dict.fromkeys(range(5), value) for value in (0.0, 50.0))
    entry = make_entry(make_claim('<'), make_runs(zero_values, zero_values))
    assert (entry['verdict'], entry['can_have_either_sign']) == ('not testable here', False)
    assert 'attention:softmax' in entry['untestable_reason']
    assert '0.0 %' in entry['untestable_reason']
    assert make_entry(make_claim('<'), make_runs(large_values, zero_values))['verdict'] == 'contradicted'
    assert make_entry(make_claim('>'), make_runs(zero_values, zero_values))['verdict'] == 'not seen'


def test_claim_stays_unsettled_if_interval_allows_a_difference_that_counts():
    small_values = dict(enumerate((0.0, 10.0, 0.0, 5.0, 2.0)))  # their mean of 3.4 is below 5
    runs = make_runs(dict.fromkeys(range(5), 0.0), small_values)
    assert make_entry(make_claim('<'), runs)['verdict'] == 'unsettled'


def test_rows_whose_runs_all_fail_are_named_except_in_claims_about_failures():
    runs = make_runs(dict.fromkeys(range(5), 0.0), dict.fromkeys(range(5), 50.0))
    for seed, run in runs[SIGMOID.row].items():
        run['end']['fails'] = 1.0
        runs[SOFTMAX.row][seed]['end']['fails'] = float(seed != '0')
    entry = make_entry(make_claim(), runs)
    assert (entry['failing_rows'], entry['verdict']) == ([SIGMOID.row], 'not testable here')
    assert not entry['can_have_either_sign'], 'the sign test leaves it out'
    loss_claim = Claim(
        'A.', 'source', Reading(SIGMOID.row, 'valid/loss'), '<', Reading(SOFTMAX.row, 'valid/loss'), 0.02
    )
    for row, loss in ((SIGMOID.row, 6.0), (SOFTMAX.row, 3.0)):
        for run in runs[row].values():
            run['end']['valid/loss'] = loss
    assert make_entry(loss_claim, runs)['verdict'] == 'contradicted'
    failure_claim = Claim('A.', 'source', Reading(SIGMOID.row, 'fails'), '>', Reading(SOFTMAX.row, 'fails'), 0.5)
    assert make_entry(failure_claim, runs)['failing_rows'] == []
    assert make_entry(make_claim(), {})['failing_rows'] == []
    assert SIGMOID.row in claims.format_notes([make_entry(make_claim(), runs)])[0]
    assert claims.format_notes([make_entry(failure_claim, runs)]) == []


def make_sign_entry(relation, *values, **fields):
    entry = dict(relation=relation, mean=sum(values), interval=(0, 1), can_have_either_sign=True)
    entry |= dict(differences=dict(enumerate(values)), unit='%', min_difference=1.0)
    return entry | fields


def test_sign_test_matches_binomial_distribution():
    entries = [make_sign_entry('<', -1.0 - n) for n in range(7)] + [make_sign_entry('>', -1.0 - n) for n in range(2)]
    entries += [
        make_sign_entry('=', 1.0),
        make_sign_entry('<', 1.0, interval=None),
        make_sign_entry('>', 1.0, can_have_either_sign=False),
        make_sign_entry('<', 0.0),
    ]
    p = pytest.approx((36 + 9 + 1) / 2**9)
    assert claims.compute_sign_test(entries) == dict(claims=9, as_claimed=7, distinct=9, distinct_as_claimed=7, p=p)
    assert claims.compute_sign_test([]) == dict(claims=0, as_claimed=0, distinct=0, distinct_as_claimed=0, p=None)


def test_sign_test_counts_claims_with_same_differences_once():
    signs_and_values = [('<', -3.0, -2.0), ('>', 3.0, 2.9), ('<', -2.0, -3.5), ('<', 3.0, 2.0)]
    entries = [make_sign_entry(*values, min_difference=5.0) for values in signs_and_values]
    entries.append(make_sign_entry('<', -3.0, -2.0, min_difference=5.0, unit='nats'))
    assert claims.compute_sign_test(entries) == dict(
        claims=5, as_claimed=4, distinct=4, distinct_as_claimed=3, p=5 / 16
    )


def test_claims_table_lists_contradicted_claims_first():
    contradicted_claim = Claim('A.', 'source', SIGMOID, '>', SOFTMAX, MIN_DIFFERENCE)
    entries = claims.make_claims_table(
        {'far': make_claim(untestable_reason='too far'), 'holds': make_claim(), 'against': contradicted_claim},
        make_runs({n: 1.0 + n for n in range(5)}, dict.fromkeys(range(5), 50.0)),
        {},
    )
    assert [entry['claim'] for entry in entries] == ['against', 'holds', 'far']


def test_claim_cannot_be_tested_only_at_sizes_with_a_reason():
    definition = dict(statement='A.', source='s', left=('a:b', 'sink/1'), right=('a:c', 'sink/1'), min_difference=5.0)
    definitions = {'mine': definition | dict(untestable_at={'quickstart': 'is of long texts'})}
    at_quickstart, at_small, at_any_size = (
        claims.parse_claims(definitions, size)['mine'] for size in ('quickstart', 'small', None)
    )
    assert (at_quickstart.left, at_quickstart.untestable_reason) == (None, 'is of long texts')
    assert at_small == at_any_size == claims.parse_claims({'mine': definition})['mine']


@pytest.fixture(scope='module')
def shipped_claims():
    return claims.parse_claims(CLAIMS)


@pytest.mark.slow
def test_shipped_claims_name_known_rows_and_metrics(shipped_claims):
    for name, claim in shipped_claims.items():
        assert claim.statement, name
        assert claim.source, name
        assert bool(claim.untestable_reason) != bool(claim.left), name
        for reading in claim.readings:
            for size in {'quickstart', 'small'}:
                config_flags.load_spec(get_config_path(reading.row), [], size)
            assert (
                reading.metric == 'fails'
                or registry.find_metric_info(reading.metric)
                or reading.metric == 'valid/loss'
            ), name
    assert sum(claim.left is not None for claim in shipped_claims.values()) >= 30


@pytest.mark.parametrize('size', ['quickstart', 'paper'])
@pytest.mark.slow
def test_shipped_claims_compare_rows_that_differ_only_in_their_diffs(shipped_claims, size):
    for name, claim in shipped_claims.items():
        loaded = [config_flags.load_spec(get_config_path(reading.row), [], size) for reading in claim.readings]
        if loaded:
            fields = [flatten_dict(dataclasses.asdict(spec)) for spec, _ in loaded]
            different_paths = {path for path in fields[0] if fields[0][path] != fields[1][path]}
            assert different_paths <= {path for _, row in loaded for path in row['diff']}, name
            assert different_paths or len({reading.row for reading in claim.readings}) == 1, name


def test_shipped_claims_agree_with_published_numbers(shipped_claims):
    published = collect_published_numbers(shipped_claims)
    for name, claim in shipped_claims.items():
        difference = claims.get_published_difference(claim, published)
        if difference is not None:
            published_relation = '=' if abs(difference) < claim.min_difference else '>' if difference > 0 else '<'
            assert published_relation == claim.relation, name
