"""Claims: what intervals of paired differences say of them, where the truth is known, and what a file of them is."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny

from configs.claims import CLAIMS
from sinklab.cli import config
from sinklab.cli.claims import file_of, first_alike
from sinklab.cli.main import main
from sinklab.folder import flat
from sinklab.measure import table as measures
from sinklab.report import claims
from sinklab.report.claims import Claim, Reading
from sinklab.report.interval import interval
from sinklab.sweep import results

ROOT = Path(__file__).parents[1]
LEAST = 5.0
SIGMOID, SOFTMAX = Reading('attention:sigmoid', 'sink/1'), Reading('attention:softmax', 'sink/1')


def a_claim(way='<', **more):
    return Claim('words', 'source', SIGMOID, way, SOFTMAX, LEAST, **more)


def said(values, way):
    return claims.verdict(interval(values, claims.LEVEL), list(values), a_claim(way))


WRONG = {
    ('>', 0): {'holds', 'contradicted'},
    ('<', 0): {'holds', 'contradicted'},
    ('=', 0): {'contradicted'},
    ('>', 20): {'contradicted', 'not seen'},
    ('<', 20): {'holds', 'not seen'},
    ('=', 20): {'holds'},
}


def verdicts(way, truth, count=2000):
    """On claims whose difference is `truth`, three seeds being added where five leave one open."""
    rng = np.random.default_rng(0)
    for difference_N in (paired_shares(rng, truth) for _ in range(count)):
        first = said(difference_N[:5], way)
        yield said(difference_N, way) if first == 'unsettled' else first


def paired_shares(rng, truth):
    """Differences in points of eight seeds of two arms, whose shares are skewed and lie `truth` apart."""
    mean, breadth = rng.uniform(0.3, 0.9), rng.uniform(3, 60)
    shares = [rng.beta(one * breadth, (1 - one) * breadth, 8) for one in (mean, mean - truth / 100)]
    return 100 * (shares[0] - shares[1])


@pytest.mark.parametrize(('way', 'truth'), WRONG)
def test_whatever_the_truth_is_no_more_than_5_of_100_claims_get_a_wrong_verdict(way, truth):
    assert np.isin([*verdicts(way, truth)], [*WRONG[way, truth]]).mean() <= 0.05


@pytest.mark.parametrize('way', ['>', '<', '='])
def test_of_decided_verdicts_95_of_100_are_right(way):
    """Of claims of which half are of a difference, and half of none."""
    found = [(verdict, truth) for truth in (0, 20) for verdict in verdicts(way, truth)]
    decided = [verdict in WRONG[way, truth] for verdict, truth in found if verdict != 'unsettled']
    assert len(decided) > 1500
    assert np.mean(decided) <= 0.05


@pytest.mark.parametrize(
    ('values', 'more', 'less', 'same'),
    [
        ([20, 21, 22, 23, 24], 'holds', 'contradicted', 'contradicted'),
        ([-20, -21, -22, -23, -24], 'contradicted', 'holds', 'contradicted'),
        ([0.5, -0.5, 0.2, 0.1, -0.2], 'not seen', 'not seen', 'holds'),
        ([1.0, 1.1, 1.2, 1.0, 1.1], 'not seen', 'not seen', 'holds'),  # surely above 0, and nothing that counts
        ([0, 0, 0, 0, 0], 'not seen', 'not seen', 'holds'),
        ([40, -30, 50, -10, 20], 'unsettled', 'unsettled', 'unsettled'),
        ([20, 21, 20, 21], 'unsettled', 'unsettled', 'unsettled'),
        ([], 'not run', 'not run', 'not run'),
    ],
)
def test_a_verdict_is_of_the_interval_and_of_what_counts(values, more, less, same):
    bounds = interval(values, claims.LEVEL) if values else None
    assert [claims.verdict(bounds, values, a_claim(way)) for way in '><='] == [more, less, same]


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
    return claims.entry('name', claim, found, published or {})


def test_differences_are_of_the_seeds_that_both_have():
    ours = {0: 1.0, 1: 2.0, 3: 5.0, 4: 0.0, 5: 10.0}
    theirs = {0: 51.0, 1: 42.0, 2: 7.0, 3: 65.0, 4: 40.0, 5: 60.0, 6: 50.0}
    found = the_entry(a_claim(), runs(ours, theirs))
    assert found['differences'] == {'0': -50.0, '1': -40.0, '3': -60.0, '4': -40.0, '5': -50.0}
    assert found['mean'] == -48
    assert found['interval'] == interval([-50.0, -40.0, -60.0, -40.0, -50.0], claims.LEVEL)
    assert found['verdict'] == 'holds'


def test_a_run_that_diverged_is_an_outcome_of_its_own():
    some = the_entry(a_claim(), runs({n: 1.0 + n for n in range(5)}, {n: 50.0 + n for n in range(7)}, lost=(5, 6)))
    assert (some['verdict'], some['diverged'], claims.said(some)) == ('holds', 2, 'holds, 2 diverged')
    most = the_entry(a_claim(), runs({0: 1.0}, dict.fromkeys(range(5), 50.0), lost=(1, 2, 3, 4)))
    assert (most['verdict'], most['diverged']) == ('diverged', 4)
    fails = Claim('words', 'source', Reading(SIGMOID.row, 'fails'), '>', Reading(SOFTMAX.row, 'fails'), 0.5)
    found = runs({}, dict.fromkeys(range(5), 50.0), lost=range(5))
    for run in found[SOFTMAX.row].values():
        run['end']['fails'] = 0.0
    entry = the_entry(fails, found)
    assert (entry['verdict'], entry['diverged'], entry['either']) == ('holds', 0, False)


def test_what_was_published_is_the_difference_of_the_rows_numbers():
    published = {SIGMOID.row: {'sink/1': 0.44}, SOFTMAX.row: {'sink/1': 18.18}}
    assert the_entry(a_claim(), {}, published)['published'] == pytest.approx(-17.74)
    assert the_entry(a_claim(), {}, {SIGMOID.row: {}})['published'] is None
    emerges = Claim('words', 'source', SOFTMAX, '>', Reading(SOFTMAX.row, 'sink/1', 'start'), LEAST)
    assert the_entry(emerges, {}, published)['published'] == 18.18
    entry = the_entry(emerges, runs({}, {0: 30.0, 1: 40.0, 2: 35.0, 3: 33.0, 4: 41.0}))
    assert (entry['verdict'], entry['either']) == ('holds', False)


@pytest.mark.parametrize('values', [[40.0, -20.0, 10.0, -30.0, 50.0], [8.0, -1.0, 3.5, 9.0, -2.0, 3.5], [2.0] * 5])
def test_with_as_many_seeds_as_are_needed_it_is_settled_and_not_before(values):
    """Of differences without skewness, more of the same."""
    values = np.array(values) + [0.01, 0, 0, 0, -0.01, 0][: len(values)]
    count = claims.needed(list(values), a_claim('>'))
    for times in range(1, 40):
        n = times * len(values)
        if n < 0.8 * count:
            assert said(np.tile(values, times), '>') == 'unsettled'
        if n >= count:
            assert said(np.tile(values, times), '>') != 'unsettled'
    assert claims.needed([1e4, -1e4, 0.0, 1e4, -1e4], a_claim('>')) is None
    assert claims.needed([50.0, 51.0], a_claim('>')) == 5


def test_the_sign_test_is_of_coins():
    def one(way, mean, interval=(0, 1), either=True):
        return dict(way=way, mean=mean, interval=interval, either=either)

    entries = [one('<', -1.0)] * 7 + [one('>', -1.0)] * 2
    entries += [one('=', 1.0), one('<', 1.0, interval=None), one('>', 1.0, either=False), one('<', 0.0)]
    assert claims.sign_test(entries) == dict(claims=9, as_published=7, p=pytest.approx((36 + 9 + 1) / 2**9))
    assert claims.sign_test([]) == dict(claims=0, as_published=0, p=None)


def test_what_speaks_against_the_paper_stands_first():
    against = Claim('words', 'source', SIGMOID, '>', SOFTMAX, LEAST)
    found = claims.table(
        {'far': a_claim(why='too far'), 'holds': a_claim(), 'against': against},
        runs({n: 1.0 + n for n in range(5)}, dict.fromkeys(range(5), 50.0)),
        {},
    )
    assert [entry['claim'] for entry in found] == ['against', 'holds', 'far']
    page = claims.markdown(found)
    assert page.index('`against`') < page.index('`holds`') < page.index('too far')


@pytest.fixture(scope='module')
def given():
    return claims.claims(CLAIMS)


def test_every_claim_is_of_rows_and_numbers_that_there_are(given):
    for name, claim in given.items():
        assert claim.words, name
        assert claim.source, name
        assert bool(claim.why) != bool(claim.of), name
        for reading in claim.readings:
            config.load(file_of(reading.row), [], 'quickstart')
            assert reading.number == 'fails' or measures.number(reading.number) or reading.number == 'valid/loss', (
                name
            )
    assert sum(claim.of is not None for claim in given.values()) >= 30


@pytest.mark.parametrize('size', ['quickstart', 'paper'])
def test_rows_that_are_compared_differ_in_what_they_say_alone(given, size):
    for name, claim in given.items():
        loaded = [config.load(file_of(reading.row), [], size) for reading in claim.readings]
        if loaded:
            fields = [flat(dataclasses.asdict(spec)) for spec, _ in loaded]
            differ = {path for path in fields[0] if fields[0][path] != fields[1][path]}
            assert differ <= {path for _, row in loaded for path in row['diff']}, name
            assert differ or len({reading.row for reading in claim.readings}) == 1, name


def test_a_claim_that_is_published_with_numbers_is_what_they_say(given):
    rows = {reading.row for claim in given.values() for reading in claim.readings}
    published = {row: config.about_row(file_of(row))['published'] for row in rows}
    for name, claim in given.items():
        difference = claims.of_rows(claim, published)
        if difference is not None:
            said = '=' if abs(difference) < claim.least else '>' if difference > 0 else '<'
            assert said == claim.way, name


def test_rows_that_are_one_run_are_trained_once_also_when_they_are_asked_for_one_by_one():
    """B is A's run: asked for alone afterwards, it is A that goes on."""
    specs = {'A': tiny(), 'B': tiny(), 'C': tiny(seed=2)}
    before = dict(same={}, configs={}, runs={'A': {'0': 'of A'}})
    same = first_alike(specs)
    assert same == {'A': 'A', 'B': 'A', 'C': 'C'}
    after = results.add(before, specs, same, [], set())
    assert after['same'] == {'B': 'A'}
    assert results.by_row(after)['B'] == {'0': 'of A'}
    specs['B'] = tiny(seed=3)
    assert results.add(after, specs, first_alike(specs), [], set())['same'] == {}


def test_a_row_that_is_another_than_when_it_was_measured_is_named():
    specs = {'A': tiny(), 'B': tiny(seed=2)}
    found = results.add(dict(same={}, configs={}, runs={'A': {}, 'B': {}}), specs, {}, [], set())
    assert found['configs']['B'] == {'seed': 2}
    assert results.changed(found, specs) == []
    assert results.changed(found, specs | {'B': tiny(seed=3)}) == ['B (seed 2 -> 3)']
    assert results.changed(found, specs | {'B': tiny(seed=2, data__share=0.5)}) == ['B (data.share 1.0 -> 0.5)']
    assert results.changed(found, {row: tiny(seed=spec.seed, data__share=0.5) for row, spec in specs.items()}) == [
        'A (data.share 1.0 -> 0.5)'
    ]
    del found['configs']['A']['data.share']
    assert results.changed(found, specs) == [], 'a field that came later'


def test_every_interval_of_shares_is_drawn(monkeypatch, tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot')
    kept, close = [], plt.close
    monkeypatch.setattr(plt, 'close', kept.append)
    forest = pytest.importorskip('sinklab.report.forest')
    found = claims.table(
        {'holds': a_claim(), 'against': a_claim('>'), 'far': a_claim(why='too far'), 'empty': a_claim()},
        runs({n: 1.0 + n for n in range(5)}, {n: 50.0 + n**2 for n in range(5)}),
        {},
    )
    forest.write(tmp_path / 'claims.png', found, '%')
    (figure,) = kept
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    drawn = [line.get_xdata() for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    close(figure)
    shown = [entry for entry in found if entry['interval'] and not entry['why']]
    assert names == [f'{entry["claim"]} {entry["way"]}' for entry in shown]
    for entry, line in zip(shown, drawn, strict=False):
        np.testing.assert_allclose(line, entry['interval'])
    assert (tmp_path / 'claims.png').read_bytes()[:4] == b'\x89PNG'


def test_the_page_of_results_is_what_the_numbers_say(capsys):
    folder = ROOT / 'docs' / 'results'
    assert main(['claims', f'--results={folder}/claims.json', '--markdown']) == 0
    said = capsys.readouterr()
    assert said.out in (folder / 'claims.md').read_text(encoding='utf-8')
    assert said.err == '', 'rows have changed since they were measured'
