"""What claims refuse, and what they list."""

import json

import pytest

from configs.claims import CLAIMS
from sinklab.cli.main import main
from sinklab.report import claims
from sinklab.schema import UserError


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['sigmod', '--workdir=x'], "claim 'sigmod' is unknown; did you mean sigmoid? (claims: emerges, "),
        (['sigmoid'], 'give --workdir=DIR to train the runs, --results=FILE to judge'),
        (['--workdir=x', '--list'], 'give --workdir=DIR to train the runs, --results=FILE to judge'),
        (['--workdir=x', '--results=y'], 'give --workdir=DIR to train the runs, --results=FILE to judge'),
        (['--results=there/is/none.json'], 'none.json cannot be read ('),
        (['--results=setup.py'], 'setup.py cannot be read ('),
        (['sigmoid', '--workdir=x', '--seeds=0'], '--seeds=0 is a count'),
        (['sigmoid', '--workdir=x', '--seeds=2.5'], '--seeds=2.5: '),
        (['sigmoid', '--workdir=x', '--seeds=1,1'], '--seeds=1,1: '),
        (['sigmoid', '--workdir=x', '--jobs=0'], '--jobs=0 must be a whole number of at least 1'),
        (['sigmoid', '--workdir=x', '--size=huge'], "there is no size 'huge'"),
        (['sigmoid', '--workdir=x', '--wandb'], '--wandb is unknown'),
        (['sigmoid', '--workdir=x', '--config.seed=3'], 'a sweep sets both seeds of a run; give --seeds'),
        (['sigmoid', '--workdir=x', '--config=configs/default.py'], 'has no CLAIMS; see configs/claims.py for one'),
        (['--results=docs/results/claims.json', '--seeds=3'], '--seeds=3 is for training, and --results='),
        (['--results=docs/results/claims.json', '--size=smoke'], '--size=smoke is for training, and --results='),
        (['sigmoid', '--workdir=x', '--png=there/is/none.png'], '--png=there/is/none.png: there is no folder '),
        (['--results=README.md', '--config.seed=3'], '--config.seed=3 is not allowed here'),
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
    assert 'contains no overrides, same, configs, runs; give' in capsys.readouterr().err
    (tmp_path / 'mine.py').write_text("CLAIMS = {'odd': dict(words='w', source='s', whose='mine')}")
    assert main(['claims', f'--config={tmp_path}/mine.py', '--workdir=x']) == 1
    assert 'claim odd is ' in capsys.readouterr().err


GOOD = dict(words='w', source='s', of=('a:b', 'sink/1'), way='<', than=('a:c', 'sink/1'), least=5.0)


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        (dict(way='less'), "its way is 'less'; it must be one of >, <, ="),
        (dict(than=('a:c', 'sink/1', 'begin')), "'begin' is not a time of a measurement; give end or start"),
        (
            dict(of=('a:b', 'valid/los'), than=('a:c', 'valid/los')),
            "number 'valid/los' is unknown; did you mean valid/loss?",
        ),
        (
            dict(than=('a:c', 'valid/loss'), of=('a:b', 'mass/row')),
            'mass/row and valid/loss are different kinds of metrics',
        ),
        (dict(least=-5), 'its least is -5'),
        (dict(than=('a:b', 'sink/1')), 'compares Sink_1 of a:b with itself'),
        (dict(of=None), 'it has only one of "of" and "than"'),
    ],
)
def test_a_claim_that_is_none_is_refused_before_anything_is_trained(given, words):
    with pytest.raises(UserError) as refused:
        claims.parse_claims({'mine': {name: value for name, value in (GOOD | given).items() if value is not None}})
    assert str(refused.value).startswith('claim mine: ')
    assert words in str(refused.value)


def test_a_folder_of_a_sweep_is_none_for_claims(capsys, tmp_path):
    (tmp_path / 'sweep.json').write_text('[]')
    assert main(['claims', 'sigmoid', f'--workdir={tmp_path}']) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert 'is the folder of a sweep (it contains a sweep.json); give another --workdir' in line
    assert [path.name for path in tmp_path.iterdir()] == ['sweep.json']


def test_a_list_says_every_claim_in_words(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')  # where there is no room, words are folded
    assert main(['claims', '--list']) == 0
    printed = capsys.readouterr().out
    for name, about in CLAIMS.items():
        assert name in printed
        assert about['words'] in printed
