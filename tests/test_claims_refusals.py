"""Tests of the errors and of the list of `sinklab claims`."""

import contextlib
import json
from pathlib import Path

import pytest

from sinklab.cli.main import main
from sinklab.configs.claims import CLAIMS
from sinklab.errors import UserError
from sinklab.report import claims


@pytest.mark.parametrize(
    ('arguments', 'texts'),
    [
        (['sigmod', '--workdir=x'], ["'sigmod'", 'mean sigmoid?']),
        (['sigmoid'], ['--workdir', '--results', '--list']),
        (['--workdir=x', '--list'], ['--workdir', '--results', '--list']),
        (['--workdir=x', '--results=y'], ['--workdir', '--results', '--list']),
        (['--results=docs'], ['docs', 'folder']),
        (['--results=there/is/none.json'], ['there/is/none.json', 'claims.json']),
        (['--results=setup.py'], ['setup.py', 'claims.json']),
        (['sigmoid', '--workdir=x', '--seeds=0'], ['--seeds=0']),
        (['sigmoid', '--workdir=x', '--jobs=0'], ['--jobs', '0', 'at least 1']),
        (['sigmoid', '--workdir=x', '--size=huge'], ["'huge'", 'smoke']),
        (['sigmoid', '--workdir=x', '--wandb'], ['--wandb']),
        (['sigmoid', '--workdir=x', '--config.seed=3'], ['--config.seed=3', '--seeds']),
        (['sigmoid', '--workdir=x', '--config=configs/default.py'], ['configs/default.py', 'CLAIMS']),
        (['--results=docs/results/claims.json', '--seeds=3'], ['--results=', '--seeds']),
        (['sigmoid', '--workdir=x', '--png=there/is/none.png'], ['--png=there/is/none.png']),
        (['--results=README.md', '--config.seed=3'], ['--config.seed=3']),
    ],
)
def test_claims_command_rejects_invalid_arguments_with_one_line(capsys, arguments, texts):
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(['claims', *arguments]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith('sinklab claims: ')
    assert [text for text in texts if text not in line] == []


def test_claims_command_rejects_invalid_results_file_and_claim(capsys, tmp_path):
    (tmp_path / 'claims.json').write_text(json.dumps(dict(size='smoke')))
    assert main(['claims', f'--results={tmp_path}/claims.json']) == 1
    assert 'overrides' in capsys.readouterr().err
    (tmp_path / 'mine.py').write_text("CLAIMS = {'odd': dict(statement='A.', source='s', whose='mine')}")
    assert main(['claims', f'--config={tmp_path}/mine.py', '--workdir=x']) == 1
    assert 'claim odd' in capsys.readouterr().err


VALID_CLAIM = dict(
    statement='A.', source='s', left=('a:b', 'sink/1'), relation='<', right=('a:c', 'sink/1'), min_difference=5.0
)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(relation='less'), "its relation is 'less'; it must be one of >, <, ="),
        (dict(right=('a:c', 'sink/1', 'begin')), "'begin' is not a time of a measurement; give end or start"),
        (
            dict(left=('a:b', 'valid/los'), right=('a:c', 'valid/los')),
            "metric 'valid/los' is unknown; did you mean valid/loss?",
        ),
        (
            dict(right=('a:c', 'valid/loss'), left=('a:b', 'mass/row')),
            'mass/row and valid/loss are different kinds of metrics',
        ),
        (dict(right=('a:c', 'valid/loss')), 'sink/1 and valid/loss are different kinds of metrics'),
        (dict(right=('a:c', 'entropy/row')), 'sink/1 and entropy/row are different kinds of metrics'),
        (dict(min_difference=-5), 'its min_difference is -5'),
        (dict(right=('a:b', 'sink/1')), 'compares Sink_1 of a:b with itself'),
        (dict(left=None), 'it has only one of "left" and "right"'),
    ],
)
def test_parse_claims_rejects_invalid_claim(changes, message):
    with pytest.raises(UserError) as raised:
        claims.parse_claims(
            {'mine': {name: value for name, value in (VALID_CLAIM | changes).items() if value is not None}}
        )
    assert str(raised.value).startswith('claim mine: ')
    assert message in str(raised.value)


def test_claims_command_rejects_folder_of_sweep(capsys, tmp_path):
    (tmp_path / 'sweep.json').write_text('[]')
    assert main(['claims', 'sigmoid', f'--workdir={tmp_path}']) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert 'sweep.json' in line
    assert '--workdir' in line
    assert {path.name for path in tmp_path.iterdir()} == {'sweep.json', 'owner.json', 'run.lock'}


def test_claims_list_prints_every_claim_with_description(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')  # a narrow terminal would wrap the descriptions
    assert main(['claims', '--list']) == 0
    output = capsys.readouterr().out
    for name, claim in CLAIMS.items():
        assert name in output
        assert claim['statement'] in output


def test_claims_command_rejects_results_of_unknown_size(capsys, tmp_path):
    claims_data = json.loads(Path('docs/results/claims.json').read_text())
    rows = ['attention:softmax', 'attention:sigmoid']
    claims_data |= {name: {row: claims_data[name][row] for row in rows} for name in ('configs', 'runs')}
    (tmp_path / 'claims.json').write_text(json.dumps(claims_data | dict(size='quikstart', same={})))
    assert main(['claims', f'--results={tmp_path}/claims.json']) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "'quikstart'" in line


def test_results_of_renamed_rows_are_judged(capsys, tmp_path):
    claims_data = json.loads(Path('docs/results/claims.json').read_text())
    for name in ('configs', 'runs'):
        rows = {row: claims_data[name][row] for row in ('attention:softmax', 'attention:sigmoid')}
        claims_data[name] = {f'{row}_old': value for row, value in rows.items()}
    (tmp_path / 'claims.json').write_text(json.dumps(claims_data | dict(same={})))
    assert main(['claims', 'sigmoid', f'--results={tmp_path}/claims.json']) == 0
    assert '1 claim: 1 holds' in capsys.readouterr().out


def test_damaged_claims_file_of_folder_is_to_be_restored(capsys, tmp_path):
    (tmp_path / 'claims.json').write_text('{}')
    assert main(['claims', 'sigmoid', f'--workdir={tmp_path}']) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert 'restore it, or give another --workdir' in line
    assert (tmp_path / 'claims.json').read_text() == '{}'


def test_verdicts_of_named_claims_come_with_comparison_and_reason(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')
    assert main(['claims', 'gate_headwise', 'decay_more', '--results=docs/results/claims.json']) == 0
    output = ' '.join(capsys.readouterr().out.split())
    assert 'Sink_1 of blocks:gate_headwise less than Sink_1 of blocks:swiglu' in output
    assert 'Not testable here: decay_more (has runs that all fail to train: optimization:decay_0.5)' in output
    assert 'Sign test' not in output, 'there are too few claims'
