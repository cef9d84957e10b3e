"""Claims: what intervals of paired differences say of them, where the truth is known."""

import dataclasses

import numpy as np
import pytest

from configs.claims import CLAIMS
from sinklab.cli import config_flags
from sinklab.cli.claims import get_config_path
from sinklab.metrics import registry
from sinklab.report import claims
from sinklab.report.claims import Claim, Operand
from sinklab.report.statistics import compute_difference_interval, decide_verdict, estimate_needed_seeds
from sinklab.run_dir import flatten_dict

LEAST = 5.0
SIGMOID, SOFTMAX = Operand('attention:sigmoid', 'sink/1'), Operand('attention:softmax', 'sink/1')


def a_claim(way='<', **more):
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
    """On claims whose difference is `truth`, three seeds being added where five leave one open."""
    rng = np.random.default_rng(0)
    for difference_N in (paired_shares(rng, truth) for _ in range(count)):
        first = said(difference_N[:5], way)
        yield said(difference_N, way) if first == 'unsettled' else first


def paired_shares(rng, truth):
    """Differences in points of eight seeds of two arms, whose shares are skewed and lie `truth` apart."""
    mean, breadth = rng.uniform(0.3, 0.9), 10 ** rng.uniform(0.5, 3.5)
    shares = [rng.beta(one * breadth, (1 - one) * breadth, 8) for one in (mean, mean - truth / 100)]
    return 100 * (shares[0] - shares[1])


@pytest.mark.parametrize(('way', 'truth'), WRONG)
def test_whatever_the_truth_is_no_more_than_5_of_100_claims_get_a_wrong_verdict(way, truth):
    assert np.isin([*verdicts(way, truth)], [*WRONG[way, truth]]).mean() <= 0.05


@pytest.mark.parametrize('way', ['>', '<', '='])
def test_of_decided_verdicts_95_of_100_are_right(way):
    """Of claims of which half are of a difference, and half of none."""
    found = [(verdict, truth) for truth in (0, 20) for verdict in verdicts(way, truth)]
    wrong = [verdict in WRONG[way, truth] for verdict, truth in found if verdict != 'unsettled']
    assert len(wrong) > 1500
    assert np.mean(wrong) <= 0.05


@pytest.mark.parametrize(
    ('values', 'more', 'less', 'same'),
    [
        ([20, 21, 22, 23, 24], 'holds', 'contradicted', 'contradicted'),
        ([-20, -21, -22, -23, -24], 'contradicted', 'holds', 'contradicted'),
        ([0.5, -0.5, 0.2, 0.1, -0.2], 'not seen', 'not seen', 'holds'),
        ([1.0, 1.1, 1.2, 1.0, 1.1], 'not seen', 'not seen', 'holds'),  # surely above 0, and nothing that counts
        ([0, 0, 0, 0, 0], 'not seen', 'not seen', 'holds'),
        ([40, -30, 50, -10, 20], 'unsettled', 'unsettled', 'unsettled'),
        ([4, 6, 8, 10, 12], 'holds', 'contradicted', 'unsettled'),  # perhaps by so little that it does not count
        ([20, 21, 20, 21], 'unsettled', 'unsettled', 'unsettled'),
        ([], 'not run', 'not run', 'not run'),
    ],
)
def test_a_verdict_is_of_the_interval_and_of_what_counts(values, more, less, same):
    found = compute_difference_interval(values) if values else None
    assert [claims.judge_claim(a_claim(way), values, found, 0) for way in '><='] == [more, less, same]


def test_more_and_less_are_one_claim_turned_around():
    rng = np.random.default_rng(1)
    for _ in range(200):
        values = rng.normal(rng.uniform(-20, 20), rng.uniform(1, 20), 5)
        assert said(values, '<') == said(-values, '>')
        assert said(values, '=') == said(-values, '=')


def runs(ours, theirs, lost=()):
    """{row: {seed: what was measured}} of two arms; seeds of `lost` have diverged in the first."""

    def of(values, lost=()):
        done = {
            str(seed): dict(outcome='done', start={'sink/1': 0.0}, end={'sink/1': value})
            for seed, value in values.items()
        }
        return done | {str(seed): dict(outcome='diverged', start={}, end={'fails': 1.0}) for seed in lost}

    return {SIGMOID.row: of(ours, lost), SOFTMAX.row: of(theirs)}


def the_entry(claim, found, published=None):
    return claims.make_claim_entry('name', claim, found, published or {})


def test_differences_are_of_the_seeds_that_both_have():
    ours = {0: 1.0, 1: 2.0, 3: 5.0, 4: 0.0, 5: 10.0}
    theirs = {0: 51.0, 1: 42.0, 2: 7.0, 3: 65.0, 4: 40.0, 5: 60.0, 6: 50.0}
    found = the_entry(a_claim(), runs(ours, theirs))
    assert found['differences'] == {'0': -50.0, '1': -40.0, '3': -60.0, '4': -40.0, '5': -50.0}
    assert found['mean'] == -48
    assert found['interval'] == compute_difference_interval([-50.0, -40.0, -60.0, -40.0, -50.0])
    assert found['verdict'] == 'holds'


def test_a_run_that_diverged_is_an_outcome_of_its_own():
    some = the_entry(a_claim(), runs({n: 1.0 + n for n in range(5)}, {n: 50.0 + n for n in range(7)}, lost=(5, 6)))
    assert (some['verdict'], some['diverged'], claims.format_verdict(some)) == ('holds', 2, 'holds, 2 diverged')
    most = the_entry(a_claim(), runs({0: 1.0}, dict.fromkeys(range(5), 50.0), lost=(1, 2, 3, 4)))
    assert (most['verdict'], most['diverged']) == ('diverged', 4)
    fails = Claim('words', 'source', Operand(SIGMOID.row, 'fails'), '>', Operand(SOFTMAX.row, 'fails'), 0.5)
    found = runs({}, dict.fromkeys(range(5), 50.0), lost=range(5))
    for run in found[SOFTMAX.row].values():
        run['end']['fails'] = 0.0
    entry = the_entry(fails, found)
    assert (entry['verdict'], entry['diverged'], entry['either']) == ('holds', 0, False)


def test_what_was_published_is_the_difference_of_the_rows_numbers():
    published = {SIGMOID.row: {'sink/1': 0.44}, SOFTMAX.row: {'sink/1': 18.18}}
    assert the_entry(a_claim(), {}, published)['published'] == pytest.approx(-17.74)
    assert the_entry(a_claim(), {}, {SIGMOID.row: {}})['published'] is None
    emerges = Claim('words', 'source', SOFTMAX, '>', Operand(SOFTMAX.row, 'sink/1', 'start'), LEAST)
    assert the_entry(emerges, {}, published)['published'] == 18.18
    entry = the_entry(emerges, runs({}, {0: 30.0, 1: 40.0, 2: 35.0, 3: 33.0, 4: 41.0}))
    assert (entry['verdict'], entry['either']) == ('holds', False)


@pytest.mark.parametrize('values', [[40.0, -20.0, 10.0, -30.0, 50.0], [8.0, -1.0, 3.5, 9.0, -2.0, 3.5], [2.0] * 5])
def test_with_as_many_seeds_as_are_needed_it_is_settled_and_not_before(values):
    """Of differences without skewness, more of the same."""
    values = np.array(values) + [0.01, 0, 0, 0, -0.01, 0][: len(values)]
    count = estimate_needed_seeds(list(values), '>', LEAST)
    for times in range(1, 40):
        n = times * len(values)
        if n < 0.8 * count:
            assert said(np.tile(values, times), '>') == 'unsettled'
        if n >= count:
            assert said(np.tile(values, times), '>') != 'unsettled'
    assert estimate_needed_seeds([1e4, -1e4, 0.0, 1e4, -1e4], '>', LEAST) is None
    assert estimate_needed_seeds([50.0, 51.0], '>', LEAST) == 5


@pytest.mark.parametrize(('failures', 'verdicts'), [(0, ['unsettled', 'not seen']), (1, ['holds', 'holds'])])
def test_what_is_seen_in_no_run_of_five_may_be_so_in_half_of_all(failures, verdicts):
    """Failures are counted: with five seeds none rules out a half, with eight it does."""
    fails = Claim('words', 'source', Operand(SIGMOID.row, 'fails'), '>', Operand(SOFTMAX.row, 'fails'), 0.5)

    def of(count):
        found = runs(dict.fromkeys(range(count), 1.0), dict.fromkeys(range(count), 1.0))
        for row, run in ((row, run) for row, seeds in found.items() for run in seeds.values()):
            run['end']['fails'] = float(failures) if row == SIGMOID.row else 0.0
        return the_entry(fails, found)

    five, eight = of(5), of(8)
    assert [five['verdict'], eight['verdict']] == verdicts
    assert five['seeds_needed'] == (7 if failures == 0 else None)
    assert of(7)['verdict'] == verdicts[1]
    assert of(6)['verdict'] == verdicts[0]


def test_less_than_nothing_is_not_testable():
    nothing, some = (dict.fromkeys(range(5), value) for value in (0.0, 50.0))
    entry = the_entry(a_claim('<'), runs(nothing, nothing))
    assert (entry['verdict'], entry['either']) == ('not testable here', False)
    assert entry['why'] == 'no value can be lower: Sink_1 of attention:softmax is 0.0 % on average'
    assert the_entry(a_claim('<'), runs(some, nothing))['verdict'] == 'contradicted'
    assert the_entry(a_claim('>'), runs(nothing, nothing))['verdict'] == 'not seen'


def test_the_sign_test_is_of_coins():
    def one(way, mean, interval=(0, 1), either=True):
        return dict(way=way, mean=mean, interval=interval, either=either)

    entries = [one('<', -1.0)] * 7 + [one('>', -1.0)] * 2
    entries += [one('=', 1.0), one('<', 1.0, interval=None), one('>', 1.0, either=False), one('<', 0.0)]
    assert claims.compute_sign_test(entries) == dict(claims=9, as_published=7, p=pytest.approx((36 + 9 + 1) / 2**9))
    assert claims.compute_sign_test([]) == dict(claims=0, as_published=0, p=None)


def test_what_speaks_against_the_paper_stands_first():
    against = Claim('words', 'source', SIGMOID, '>', SOFTMAX, LEAST)
    found = claims.make_claims_table(
        {'far': a_claim(why='too far'), 'holds': a_claim(), 'against': against},
        runs({n: 1.0 + n for n in range(5)}, dict.fromkeys(range(5), 50.0)),
        {},
    )
    assert [entry['claim'] for entry in found] == ['against', 'holds', 'far']
    page = claims.format_markdown(found)
    assert page.index('`against`') < page.index('`holds`') < page.index('too far')


@pytest.fixture(scope='module')
def given():
    return claims.parse_claims(CLAIMS)


@pytest.mark.slow
def test_every_claim_is_of_rows_and_numbers_that_there_are(given):
    for name, claim in given.items():
        assert claim.words, name
        assert claim.source, name
        assert bool(claim.why) != bool(claim.of), name
        for operand in claim.operands:
            config_flags.load_spec(get_config_path(operand.row), [], 'quickstart')
            assert (
                operand.metric == 'fails'
                or registry.find_metric_info(operand.metric)
                or operand.metric == 'valid/loss'
            ), name
    assert sum(claim.of is not None for claim in given.values()) >= 30


@pytest.mark.parametrize('size', ['quickstart', 'paper'])
@pytest.mark.slow
def test_rows_that_are_compared_differ_in_what_they_say_alone(given, size):
    for name, claim in given.items():
        loaded = [config_flags.load_spec(get_config_path(operand.row), [], size) for operand in claim.operands]
        if loaded:
            fields = [flatten_dict(dataclasses.asdict(spec)) for spec, _ in loaded]
            differ = {path for path in fields[0] if fields[0][path] != fields[1][path]}
            assert differ <= {path for _, row in loaded for path in row['diff']}, name
            assert differ or len({operand.row for operand in claim.operands}) == 1, name


def test_a_claim_that_is_published_with_numbers_is_what_they_say(given):
    rows = {operand.row for claim in given.values() for operand in claim.operands}
    published = {row: config_flags.load_row_info(get_config_path(row))['published'] for row in rows}
    for name, claim in given.items():
        difference = claims.get_published_difference(claim, published)
        if difference is not None:
            said = '=' if abs(difference) < claim.least else '>' if difference > 0 else '<'
            assert said == claim.way, name


def test_every_interval_of_shares_is_drawn(monkeypatch, tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot')
    kept, close = [], plt.close
    monkeypatch.setattr(plt, 'close', kept.append)
    pictures = pytest.importorskip('sinklab.report.pictures')
    found = claims.make_claims_table(
        {'holds': a_claim(), 'against': a_claim('>'), 'far': a_claim(why='too far'), 'empty': a_claim()},
        runs({n: 1.0 + n for n in range(5)}, {n: 50.0 + n**2 for n in range(5)}),
        {},
    )
    pictures.write_claims_plot(tmp_path / 'claims.png', found, '%')
    (figure,) = kept
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    drawn = [line.get_xdata() for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    close(figure)
    shown = [entry for entry in found if entry['interval'] and not entry['why']]
    assert names == [f'{entry["claim"]} {entry["way"]}' for entry in shown]
    for entry, line in zip(shown, drawn, strict=False):
        np.testing.assert_allclose(line, entry['interval'])
    assert (tmp_path / 'claims.png').read_bytes()[:4] == b'\x89PNG'
