"""Tests of the errors and of the list of `sinklab claims`."""

import json
from pathlib import Path

import pytest
from commands import get_error_line

from sinklab.cli.main import main
from sinklab.configs.claims import CLAIMS
from sinklab.errors import UserError
from sinklab.report import claims


def fail_command(capsys, *arguments):
    """Run a claims command that is refused, and return its only line on stderr."""
    line = get_error_line(capsys, 'claims', *arguments)
    assert line.startswith('sinklab claims: ')
    return line


@pytest.mark.parametrize(
    ('arguments', 'texts'),
    [
        (['sigmod', '--workdir=x'], ["'sigmod'", 'sigmoid']),
        (['sigmoid'], ['--workdir', '--results', '--list']),
        (['--workdir=x', '--list'], ['--workdir', '--results', '--list']),
        (['--workdir=x', '--results=y'], ['--workdir', '--results', '--list']),
        (['--results=docs'], ['--results=docs', 'claims.json']),
        (['--results=there/is/none.json'], ['there/is/none.json', 'claims.json']),
        (['--results=setup.py'], ['setup.py', 'claims.json']),
        (['sigmoid', '--workdir=x', '--seeds=0'], ['--seeds=0']),
        (['sigmoid', '--workdir=x', '--size=huge'], ["'huge'", 'smoke']),
        (['sigmoid', '--workdir=x', '--wandb'], ['--wandb']),
        (['sigmoid', '--workdir=x', '--config.seed=3'], ['--config.seed=3', '--seeds']),
        (['sigmoid', '--workdir=x', '--config=configs/default.py'], ['configs/default.py', 'CLAIMS']),
        (['--results=docs/results/claims.json', '--seeds=3'], ['--results=', '--seeds']),
        (['--results=README.md', '--config.seed=3'], ['--config.seed=3']),
    ],
)
def test_claims_command_rejects_invalid_arguments_with_one_line(capsys, arguments, texts):
    line = fail_command(capsys, *arguments)
    assert [text for text in texts if text not in line] == []


def test_claims_command_rejects_invalid_file(capsys, tmp_path):
    (tmp_path / 'claims.json').write_text(json.dumps(dict(size='smoke')))
    assert 'overrides' in fail_command(capsys, f'--results={tmp_path}/claims.json')
    assert str(tmp_path) in fail_command(capsys, 'sigmoid', f'--workdir={tmp_path}')
    empty = dict(size='quikstart', overrides={}, configs={}, runs={})
    (tmp_path / 'claims.json').write_text(json.dumps(empty))
    assert "'quikstart'" in fail_command(capsys, f'--results={tmp_path}/claims.json')
    (tmp_path / 'mine.py').write_text("CLAIMS = {'odd': dict(statement='A.', source='s', whose='mine')}")
    assert 'claim odd' in fail_command(capsys, f'--config={tmp_path}/mine.py', '--workdir=x')


def test_claims_command_rejects_folder_of_sweep(capsys, tmp_path):
    (tmp_path / 'sweep.json').write_text('[]')
    line = fail_command(capsys, 'sigmoid', f'--workdir={tmp_path}')
    assert 'sweep.json' in line
    assert '--workdir' in line
    assert not any(path.is_dir() for path in tmp_path.iterdir()), 'nothing was trained'


VALID_CLAIM = dict(
    statement='A.', source='s', left=('a:b', 'sink/1'), relation='<', right=('a:c', 'sink/1'), min_difference=5.0
)


@pytest.mark.parametrize(
    ('changes', 'text'),
    [
        (dict(relation='less'), 'less'),
        (dict(right=('a:c', 'sink/1', 'begin')), 'begin'),
        (dict(left=('a:b', 'valid/los'), right=('a:c', 'valid/los')), 'valid/loss'),
        (dict(right=('a:c', 'valid/loss'), left=('a:b', 'mass/row')), 'mass/row'),
        (dict(right=('a:c', 'valid/loss')), 'valid/loss'),
        (dict(right=('a:c', 'entropy/row')), 'entropy/row'),
        (dict(min_difference=-5), '-5'),
        (dict(left=None), 'left'),
    ],
)
def test_parse_claims_rejects_invalid_claim(changes, text):
    assert claims.parse_claims({'mine': VALID_CLAIM})
    with pytest.raises(UserError) as raised:
        claims.parse_claims({'mine': VALID_CLAIM | changes})
    assert 'claim mine' in str(raised.value)
    assert text in str(raised.value)


def test_claims_list_prints_every_claim_with_description(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')  # a narrow terminal would wrap the descriptions
    assert main(['claims', '--list']) == 0
    output = capsys.readouterr().out
    texts = [text for name, claim in CLAIMS.items() for text in (name, claim['statement'])]
    assert [text for text in texts if text not in output] == []


def test_results_of_renamed_rows_are_judged(capsys, tmp_path):
    claims_data = json.loads(Path('docs/results/claims.json').read_text())
    for name in ('configs', 'runs'):
        rows = {row: claims_data[name][row] for row in ('attention:softmax', 'attention:sigmoid')}
        claims_data[name] = {f'{row}_old': value for row, value in rows.items()}
    (tmp_path / 'claims.json').write_text(json.dumps(claims_data))
    assert main(['claims', 'sigmoid', f'--results={tmp_path}/claims.json', '--json']) == 0
    assert [entry['verdict'] for entry in json.loads(capsys.readouterr().out)] == ['holds']


def test_verdicts_of_named_claims_come_with_comparison_and_reason(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')
    assert main(['claims', 'gate_headwise', 'decay_more', '--results=docs/results/claims.json']) == 0
    output = ' '.join(capsys.readouterr().out.split())
    assert 'Sink_1 of blocks:gate_headwise less than Sink_1 of blocks:swiglu' in output
    assert 'decay_more (has runs that all fail to train: optimization:decay_0.5)' in output
