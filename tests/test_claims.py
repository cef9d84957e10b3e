"""Claims: what intervals of paired differences say of them, where the truth is known, and what a file of them is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from configs.claims import CLAIMS
from sinklab.cli import config
from sinklab.cli.claims import file_of
from sinklab.cli.main import main
from sinklab.folder import flat
from sinklab.measure import table as measures
from sinklab.report import claims
from sinklab.report.claims import Claim, Reading
from sinklab.report.interval import interval

ROOT = Path(__file__).parents[1]
LEAST = 5.0
SIGMOID, SOFTMAX = Reading('attention:sigmoid', 'sink/1'), Reading('attention:softmax', 'sink/1')


def a_claim(way='<', **more):
    return Claim('words', 'source', SIGMOID, way, SOFTMAX, LEAST, **more)


def said(values, way):
    return claims.verdict(interval(values), list(values), a_claim(way))


def truly(verdict, way, truth):
    """Whether a verdict that decides is right of a true mean difference."""
    small = abs(truth) < LEAST
    side = -truth if way == '<' else truth
    return {
        'holds': small if way == '=' else side > 0,
        'contradicted': truth != 0 if way == '=' else side < 0,
        'not seen': small,
    }[verdict]


def paired_shares(rng):
    """(true difference in points, of some seeds) of two arms whose shares are drawn from skewed distributions."""
    one = rng.uniform(0.02, 0.9)
    other = one if rng.random() < 1 / 3 else rng.uniform(0.02, 0.9)
    breadth = rng.uniform(3, 60)
    shares = [rng.beta(mean * breadth, (1 - mean) * breadth, 8) for mean in (one, other)]
    return 100 * (one - other), 100 * (shares[0] - shares[1])


@pytest.mark.parametrize('way', ['<', '>', '='])
def test_verdicts_that_decide_are_right_in_95_of_100(way):
    rng, decided = np.random.default_rng(0), []
    for _ in range(2500):
        truth, difference_N = paired_shares(rng)
        verdict = said(difference_N[:5], way)
        verdict = said(difference_N, way) if verdict == 'unsettled' else verdict  # as seeds are added where they must
        if verdict != 'unsettled':
            decided.append(truly(verdict, way, truth))
    assert len(decided) > 1000
    assert np.mean(decided) >= 0.95


@pytest.mark.parametrize(
    ('values', 'more', 'less', 'same'),
    [
        ([20, 21, 22, 23, 24], 'holds', 'contradicted', 'contradicted'),
        ([-20, -21, -22, -23, -24], 'contradicted', 'holds', 'contradicted'),
        ([0.5, -0.5, 0.2, 0.1, -0.2], 'not seen', 'not seen', 'holds'),
        ([1.0, 1.1, 1.2, 1.0, 1.1], 'not seen', 'not seen', 'holds'),  # surely above 0, and nothing that counts
        ([0, 0, 0], 'not seen', 'not seen', 'holds'),
        ([40, -30, 50, -10, 20], 'unsettled', 'unsettled', 'unsettled'),
        ([20, 21], 'unsettled', 'unsettled', 'unsettled'),
        ([], 'not run', 'not run', 'not run'),
    ],
)
def test_a_verdict_is_of_the_interval_and_of_what_counts(values, more, less, same):
    bounds = interval(values) if values else None
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
    found = the_entry(a_claim(), runs({0: 1.0, 1: 2.0, 3: 5.0, 4: 0.0}, {0: 51.0, 1: 42.0, 2: 7.0, 3: 65.0, 4: 40.0}))
    assert found['differences'] == {'0': -50.0, '1': -40.0, '3': -60.0, '4': -40.0}
    assert found['mean'] == -47.5
    assert found['interval'] == interval([-50.0, -40.0, -60.0, -40.0])
    assert found['verdict'] == 'holds'


def test_a_run_that_diverged_is_an_outcome_of_its_own():
    some = the_entry(a_claim(), runs({0: 1.0, 1: 2.0, 2: 3.0}, {n: 50.0 + n for n in range(5)}, lost=(3, 4)))
    assert (some['verdict'], some['diverged'], claims.said(some)) == ('holds', 2, 'holds, 2 diverged')
    most = the_entry(a_claim(), runs({0: 1.0}, dict.fromkeys(range(5), 50.0), lost=(1, 2, 3, 4)))
    assert (most['verdict'], most['diverged']) == ('diverged', 4)
    fails = Claim('words', 'source', Reading(SIGMOID.row, 'fails'), '>', Reading(SOFTMAX.row, 'fails'), 0.5)
    found = runs({}, dict.fromkeys(range(5), 50.0), lost=range(5))
    for run in found[SOFTMAX.row].values():
        run['end']['fails'] = 0.0
    assert the_entry(fails, found)['verdict'] == 'holds'


def test_what_was_published_is_the_difference_of_the_rows_numbers():
    published = {SIGMOID.row: {'sink/1': 0.44}, SOFTMAX.row: {'sink/1': 18.18}}
    assert the_entry(a_claim(), {}, published)['published'] == pytest.approx(-17.74)
    assert the_entry(a_claim(published=-3.0), {}, published)['published'] == -3.0
    assert the_entry(a_claim(), {}, {SIGMOID.row: {}})['published'] is None
    emerges = Claim('words', 'source', SOFTMAX, '>', Reading(SOFTMAX.row, 'sink/1', 'start'), LEAST)
    assert the_entry(emerges, {}, published)['published'] == 18.18
    assert the_entry(emerges, runs({}, {0: 30.0, 1: 40.0, 2: 35.0}))['verdict'] == 'holds'


@pytest.mark.parametrize('values', [[40.0, -30.0, 50.0, -10.0, 20.0], [8.0, -1.0, 4.0, 9.0, -2.0, 3.0]])
def test_as_many_seeds_as_would_settle_it(values):
    count = claims.needed(values, a_claim('>'))
    mean, sd = np.mean(values), np.std(values, ddof=1)
    half = mean if mean >= LEAST else LEAST - mean

    def width(n):
        return stats.t.ppf(0.975, n - 1) * sd / n**0.5

    assert width(count) < half <= width(count - 1)
    assert claims.needed([1e4, -1e4, 0.0], a_claim('>')) is None


def test_the_sign_test_is_of_coins():
    entries = [dict(interval=(0, 1), way='<', mean=-1.0)] * 7 + [dict(interval=(0, 1), way='>', mean=-1.0)] * 2
    entries += [dict(interval=(0, 1), way='=', mean=1.0), dict(interval=None, way='<', mean=1.0)]
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


def test_a_claim_that_is_published_with_numbers_claims_their_direction(given):
    rows = {reading.row for claim in given.values() for reading in claim.readings}
    published = {row: config.about_row(file_of(row))['published'] for row in rows}
    for name, claim in given.items():
        difference = claim.published or claims.of_rows(claim, published)
        if difference is not None and claim.way != '=':
            assert (difference > 0) == (claim.way == '>'), name


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
    results = ROOT / 'docs' / 'results'
    assert main(['claims', f'--results={results}/claims.json', '--markdown']) == 0
    assert capsys.readouterr().out in (results / 'claims.md').read_text(encoding='utf-8')


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['sigmod', '--workdir=x'], "claim 'sigmod' is unknown; did you mean sigmoid? (claims: emerges, "),
        (['sigmoid'], 'give --workdir=DIR to train what claims want, or --results=FILE'),
        (['--workdir=x', '--results=y'], 'give --workdir=DIR to train what claims want, or --results=FILE'),
        (['--results=there/is/none.json'], 'none.json cannot be read ('),
        (['--results=setup.py'], 'setup.py cannot be read ('),
        (['sigmoid', '--workdir=x', '--seeds=0'], '--seeds=0 must be a whole number of at least 1'),
        (['sigmoid', '--workdir=x', '--jobs=0'], '--jobs=0 must be a whole number of at least 1'),
        (['sigmoid', '--workdir=x', '--size=huge'], "there is no size 'huge'"),
        (['sigmoid', '--workdir=x', '--wandb'], '--wandb has no meaning here'),
        (['sigmoid', '--workdir=x', '--config.seed=3'], 'a sweep sets both seeds of a run; give --seeds'),
        (['sigmoid', '--workdir=x', '--config=configs/default.py'], 'has no CLAIMS; see configs/claims.py for one'),
        (['--results=README.md', '--config.seed=3'], '--config.seed=3 has no meaning here'),
    ],
)
def test_what_cannot_be_asked_is_one_line(capsys, arguments, words):
    assert main(['claims', *arguments]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith('sinklab claims: ')
    assert words in line


def test_a_file_that_is_no_results_and_a_claim_that_is_none_are_one_line(capsys, tmp_path):
    (tmp_path / 'claims.json').write_text(json.dumps(dict(size='smoke')))
    assert main(['claims', f'--results={tmp_path}/claims.json']) == 1
    assert 'holds no size, overrides, same, runs' in capsys.readouterr().err
    (tmp_path / 'mine.py').write_text("CLAIMS = {'odd': dict(words='w', source='s', whose='mine')}")
    assert main(['claims', f'--config={tmp_path}/mine.py', '--workdir=x']) == 1
    assert 'claim odd is ' in capsys.readouterr().err
