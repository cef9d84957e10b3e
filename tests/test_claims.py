"""Verdicts of claims from intervals of paired differences."""

import dataclasses

import numpy as np
import pytest

from sinklab.cli import config_flags
from sinklab.cli.claims import get_config_path
from sinklab.configs.claims import CLAIMS
from sinklab.metrics import registry
from sinklab.report import claims
from sinklab.report.claims import Claim, Operand
from sinklab.report.statistics import compute_difference_interval, decide_verdict, estimate_needed_seeds
from sinklab.run_dir import flatten_dict

LEAST = 5.0
SIGMOID, SOFTMAX = Operand('attention:sigmoid', 'sink/1'), Operand('attention:softmax', 'sink/1')


def make_claim(way='<', **more):
    return Claim('words', 'source', SIGMOID, way, SOFTMAX, LEAST, **more)


def said(values, way):
    return decide_verdict(compute_difference_interval(values), np.mean(values), way, LEAST)


WRONG = {
    ('>', 0): {'holds', 'contradicted'},
    ('<', 0): {'holds', 'contradicted'},
    ('=', 0): {'contradicted'},
    ('>', 20): {'contradicted', 'not seen'},
    ('<', 20): {'holds', 'not seen'},
    ('=', 20): {'holds'},
    ('=', 4.5): {'contradicted'},
}


def verdicts(way, truth, count=2000):
    """Yield verdicts of claims with difference `truth`, from eight seeds where five leave them unsettled."""
    rng = np.random.default_rng(0)
    for difference_N in (draw_paired_shares(rng, truth) for _ in range(count)):
        first = said(difference_N[:5], way)
        yield said(difference_N, way) if first == 'unsettled' else first


def draw_paired_shares(rng, truth):
    """Return differences, in points, of eight seeds of two rows with skewed shares `truth` apart."""
    mean, breadth = rng.uniform(0.3, 0.9), 10 ** rng.uniform(0.5, 3.5)
    shares = [rng.beta(one * breadth, (1 - one) * breadth, 8) for one in (mean, mean - truth / 100)]
    return 100 * (shares[0] - shares[1])


@pytest.mark.parametrize(('way', 'truth'), WRONG)
def test_wrong_verdict_rate_is_at_most_5_percent(way, truth):
    assert np.isin([*verdicts(way, truth)], [*WRONG[way, truth]]).mean() <= 0.05


@pytest.mark.parametrize('way', ['>', '<', '='])
def test_decided_verdicts_are_at_least_95_percent_correct(way):
    """Use claims of which half have a difference."""
    result = [(verdict, truth) for truth in (0, 20) for verdict in verdicts(way, truth)]
    wrong = [verdict in WRONG[way, truth] for verdict, truth in result if verdict != 'unsettled']
    assert len(wrong) > 1500
    assert np.mean(wrong) <= 0.05


@pytest.mark.parametrize(
    ('values', 'more', 'less', 'same'),
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
def test_judge_claim_uses_interval_and_minimum_difference(values, more, less, same):
    result = compute_difference_interval(values) if values else None
    assert [claims.judge_claim(make_claim(way), values, result, 0) for way in '><='] == [more, less, same]


def test_verdict_is_symmetric_under_sign_change():
    rng = np.random.default_rng(1)
    for _ in range(200):
        values = rng.normal(rng.uniform(-20, 20), rng.uniform(1, 20), 5)
        assert said(values, '<') == said(-values, '>')
        assert said(values, '=') == said(-values, '=')


def make_runs(own_values, other_values, lost=()):
    """Return {row: {seed: measurements}} of two rows; seeds in `lost` diverged in the first row."""

    def of(values, lost=()):
        done = {
            str(seed): dict(outcome='done', start={'sink/1': 0.0}, end={'sink/1': value})
            for seed, value in values.items()
        }
        return done | {str(seed): dict(outcome='diverged', start={}, end={'fails': 1.0}) for seed in lost}

    return {SIGMOID.row: of(own_values, lost), SOFTMAX.row: of(other_values)}


def make_entry(claim, result, published=None):
    return claims.make_claim_entry('name', claim, result, published or {})


def test_claim_entry_uses_seeds_of_both_rows():
    own_values = {0: 1.0, 1: 2.0, 3: 5.0, 4: 0.0, 5: 10.0}
    other_values = {0: 51.0, 1: 42.0, 2: 7.0, 3: 65.0, 4: 40.0, 5: 60.0, 6: 50.0}
    result = make_entry(make_claim(), make_runs(own_values, other_values))
    assert result['differences'] == {'0': -50.0, '1': -40.0, '3': -60.0, '4': -40.0, '5': -50.0}
    assert result['mean'] == -48
    assert result['interval'] == compute_difference_interval([-50.0, -40.0, -60.0, -40.0, -50.0])
    assert result['verdict'] == 'holds'


def test_claim_entry_counts_diverged_runs():
    some = make_entry(
        make_claim(), make_runs({n: 1.0 + n for n in range(5)}, {n: 50.0 + n for n in range(7)}, lost=(5, 6))
    )
    assert (some['verdict'], some['diverged'], claims.format_verdict(some)) == ('holds', 2, 'holds, 2 diverged')
    most = make_entry(make_claim(), make_runs({0: 1.0}, dict.fromkeys(range(5), 50.0), lost=(1, 2, 3, 4)))
    assert (most['verdict'], most['diverged']) == ('diverged', 4)
    fails = Claim('words', 'source', Operand(SIGMOID.row, 'fails'), '>', Operand(SOFTMAX.row, 'fails'), 0.5)
    result = make_runs({}, dict.fromkeys(range(5), 50.0), lost=range(5))
    for run in result[SOFTMAX.row].values():
        run['end']['fails'] = 0.0
    entry = make_entry(fails, result)
    assert (entry['verdict'], entry['diverged'], entry['either']) == ('holds', 0, False)


def test_claim_entry_has_difference_of_published_numbers():
    published = {SIGMOID.row: {'sink/1': 0.44}, SOFTMAX.row: {'sink/1': 18.18}}
    assert make_entry(make_claim(), {}, published)['published'] == pytest.approx(-17.74)
    assert make_entry(make_claim(), {}, {SIGMOID.row: {}})['published'] is None
    emerges = Claim('words', 'source', SOFTMAX, '>', Operand(SOFTMAX.row, 'sink/1', 'start'), LEAST)
    assert make_entry(emerges, {}, published)['published'] == 18.18
    entry = make_entry(emerges, make_runs({}, {0: 30.0, 1: 40.0, 2: 35.0, 3: 33.0, 4: 41.0}))
    assert (entry['verdict'], entry['either']) == ('holds', False)


@pytest.mark.parametrize('values', [[40.0, -20.0, 10.0, -30.0, 50.0], [8.0, -1.0, 3.5, 9.0, -2.0, 3.5], [2.0] * 5])
def test_estimate_needed_seeds_matches_count_that_settles_verdict(values):
    """Repeat differences without skewness."""
    values = np.array(values) + [0.01, 0, 0, 0, -0.01, 0][: len(values)]
    count = estimate_needed_seeds(list(values), '>', LEAST)
    for times in range(1, 40):
        n = times * len(values)
        if n < 0.8 * count:
            assert said(np.tile(values, times), '>') == 'unsettled'
        if n >= count:
            assert said(np.tile(values, times), '>') != 'unsettled'
    assert estimate_needed_seeds([1e4, -1e4, 0.0, 1e4, -1e4], '>', LEAST) is None


@pytest.mark.parametrize(('failures', 'verdicts'), [(0, ['unsettled', 'not seen']), (1, ['holds', 'holds'])])
def test_claim_entry_needs_more_than_five_seeds_without_failures(failures, verdicts):
    """Check that no failures in seven seeds, but not in six, exclude a failure rate of one half."""
    fails = Claim('words', 'source', Operand(SIGMOID.row, 'fails'), '>', Operand(SOFTMAX.row, 'fails'), 0.5)

    def of(count):
        result = make_runs(dict.fromkeys(range(count), 1.0), dict.fromkeys(range(count), 1.0))
        for row, run in ((row, run) for row, seeds in result.items() for run in seeds.values()):
            run['end']['fails'] = float(failures) if row == SIGMOID.row else 0.0
        return make_entry(fails, result)

    five, eight = of(5), of(8)
    assert [five['verdict'], eight['verdict']] == verdicts
    assert five['seeds_needed'] == (7 if failures == 0 else None)
    assert of(7)['verdict'] == verdicts[1]
    assert of(6)['verdict'] == verdicts[0]


def test_claim_entry_is_not_testable_if_reference_is_zero():
    nothing, some = (dict.fromkeys(range(5), value) for value in (0.0, 50.0))
    entry = make_entry(make_claim('<'), make_runs(nothing, nothing))
    assert (entry['verdict'], entry['either']) == ('not testable here', False)
    assert 'attention:softmax' in entry['why']
    assert '0.0 %' in entry['why']
    assert make_entry(make_claim('<'), make_runs(some, nothing))['verdict'] == 'contradicted'
    assert make_entry(make_claim('>'), make_runs(nothing, nothing))['verdict'] == 'not seen'


def test_rows_whose_runs_all_fail_are_named_except_in_claims_about_failures():
    result = make_runs(dict.fromkeys(range(5), 0.0), dict.fromkeys(range(5), 50.0))
    for seed, run in result[SIGMOID.row].items():
        run['end']['fails'] = 1.0
        result[SOFTMAX.row][seed]['end']['fails'] = float(seed != '0')
    assert make_entry(make_claim(), result)['failing_rows'] == [SIGMOID.row]
    fails = Claim('words', 'source', Operand(SIGMOID.row, 'fails'), '>', Operand(SOFTMAX.row, 'fails'), 0.5)
    assert make_entry(fails, result)['failing_rows'] == []
    assert make_entry(make_claim(), {})['failing_rows'] == []
    assert SIGMOID.row in claims.format_failing_rows([make_entry(make_claim(), result)])[0]
    assert claims.format_failing_rows([make_entry(fails, result)]) == []


def test_sign_test_matches_binomial_distribution():
    def one(way, mean, interval=(0, 1), either=True):
        return dict(way=way, mean=mean, interval=interval, either=either)

    entries = [one('<', -1.0)] * 7 + [one('>', -1.0)] * 2
    entries += [one('=', 1.0), one('<', 1.0, interval=None), one('>', 1.0, either=False), one('<', 0.0)]
    assert claims.compute_sign_test(entries) == dict(claims=9, as_published=7, p=pytest.approx((36 + 9 + 1) / 2**9))
    assert claims.compute_sign_test([]) == dict(claims=0, as_published=0, p=None)


def test_claims_table_lists_contradicted_claims_first():
    against = Claim('words', 'source', SIGMOID, '>', SOFTMAX, LEAST)
    result = claims.make_claims_table(
        {'far': make_claim(why='too far'), 'holds': make_claim(), 'against': against},
        make_runs({n: 1.0 + n for n in range(5)}, dict.fromkeys(range(5), 50.0)),
        {},
    )
    assert [entry['claim'] for entry in result] == ['against', 'holds', 'far']
    page = claims.format_markdown(result)
    assert page.index('`against`') < page.index('`holds`') < page.index('too far')


def test_claim_cannot_be_tested_only_at_sizes_with_a_reason():
    definition = dict(words='w', source='s', of=('a:b', 'sink/1'), than=('a:c', 'sink/1'), least=5.0)
    definitions = {'mine': definition | dict(untestable_at={'quickstart': 'is of long texts'})}
    at_quickstart, at_small, anywhere = (
        claims.parse_claims(definitions, size)['mine'] for size in ('quickstart', 'small', None)
    )
    assert (at_quickstart.of, at_quickstart.why) == (None, 'is of long texts')
    assert at_small == anywhere == claims.parse_claims({'mine': definition})['mine']


@pytest.fixture(scope='module')
def given():
    return claims.parse_claims(CLAIMS)


@pytest.mark.slow
def test_shipped_claims_name_known_rows_and_metrics(given):
    for name, claim in given.items():
        assert claim.words, name
        assert claim.source, name
        assert bool(claim.why) != bool(claim.of), name
        for operand in claim.operands:
            for size in {'quickstart', 'small'}:
                config_flags.load_spec(get_config_path(operand.row), [], size)
            assert (
                operand.metric == 'fails'
                or registry.find_metric_info(operand.metric)
                or operand.metric == 'valid/loss'
            ), name
    assert sum(claim.of is not None for claim in given.values()) >= 30


@pytest.mark.parametrize('size', ['quickstart', 'paper'])
@pytest.mark.slow
def test_shipped_claims_compare_rows_that_differ_only_in_their_diffs(given, size):
    for name, claim in given.items():
        loaded = [config_flags.load_spec(get_config_path(operand.row), [], size) for operand in claim.operands]
        if loaded:
            fields = [flatten_dict(dataclasses.asdict(spec)) for spec, _ in loaded]
            differ = {path for path in fields[0] if fields[0][path] != fields[1][path]}
            assert differ <= {path for _, row in loaded for path in row['diff']}, name
            assert differ or len({operand.row for operand in claim.operands}) == 1, name


def test_shipped_claims_agree_with_published_numbers(given):
    rows = {operand.row for claim in given.values() for operand in claim.operands}
    published = {row: config_flags.load_row_info(get_config_path(row))['published'] for row in rows}
    for name, claim in given.items():
        difference = claims.get_published_difference(claim, published)
        if difference is not None:
            said = '=' if abs(difference) < claim.least else '>' if difference > 0 else '<'
            assert said == claim.way, name


def test_claims_plot_draws_every_interval(monkeypatch, tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot')
    closed_figures, close = [], plt.close
    monkeypatch.setattr(plt, 'close', closed_figures.append)
    pictures = pytest.importorskip('sinklab.report.pictures')
    result = claims.make_claims_table(
        {'holds': make_claim(), 'against': make_claim('>'), 'far': make_claim(why='too far'), 'empty': make_claim()},
        make_runs({n: 1.0 + n for n in range(5)}, {n: 50.0 + n**2 for n in range(5)}),
        {},
    )
    pictures.write_claims_plot(tmp_path / 'claims.png', result, '%')
    (figure,) = closed_figures
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    drawn = [line.get_xdata() for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    close(figure)
    shown = [entry for entry in result if entry['interval'] and not entry['why']]
    assert names == [f'{entry["claim"]} {entry["way"]}' for entry in shown]
    for entry, line in zip(shown, drawn, strict=False):
        np.testing.assert_allclose(line, entry['interval'])
    assert (tmp_path / 'claims.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
    ('verdicts', 'text'),
    [
        (['holds'], '1 claim: 1 holds.'),
        (['holds', 'not run', 'holds'], '3 claims: 2 hold, 1 not run.'),
        (['unsettled', 'holds'], '2 claims: 1 holds, 1 unsettled.'),
    ],
)
def test_counts_of_verdicts_agree_in_number(verdicts, text):
    assert claims.format_counts([dict(verdict=verdict) for verdict in verdicts]) == text
