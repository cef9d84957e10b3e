"""Rows of a user's own file: what is written, said, recorded and trained is the same. And what sweeps say of rows."""

import json
import re
import shutil
from pathlib import Path

import pytest

from sinklab.cli import sweep
from sinklab.cli.config_flags import get_diff_value, load_and_describe, load_spec
from sinklab.cli.main import main
from sinklab.config.seeds import SEEDS_HELP, parse_seeds
from sinklab.config.spec import Hardware
from sinklab.configs import default
from sinklab.configs.table import list_fields
from sinklab.run_dir import RunDir
from sinklab.run_dir import flatten_dict as dotted
from sinklab.schema import UserError
from sinklab.sweep import plan

OLD = Path(__file__).parent / 'released' / 'decay_0.5-0'  # row.json and config.json of version 0.1
TABLE = """
from sinklab.configs.table import scale, scale_with_size, table

ROWS = {
    'softmax': dict(diff={}, published={}, source='ours'),
    'long_warmup': dict(diff={'optimizer.warmup_steps': 400}, published={'sink/1': 18.2}, source='ours'),
    'heads': dict(diff={'model.heads': 4}, published={}, source='ours'),
    'decay': dict(diff={'optimizer.weight_decay': 0.3}, published={}, source='ours'),
    'triple': dict(diff=scale('optimizer.weight_decay', 3), published={}, source='ours'),
    'as_paper': dict(diff=scale_with_size({'optimizer.weight_decay': 0.3}), published={}, source='ours'),
}
get_config = table(ROWS)
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(TABLE)
    return path


def refused(capsys, *arguments):
    """The one line that a command is refused with."""
    assert main(list(arguments)) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def changes(said):
    """The (field, value of the baseline, value of the row) that a description of a row has."""
    return re.findall(r'([a-z_.]+) (\S+) -> ([^;\s]+)', said)


@pytest.mark.parametrize(
    ('row', 'size', 'changed'),
    [
        ('softmax', 'quickstart', []),
        ('long_warmup', 'quickstart', [('optimizer.warmup_steps', '100', '400')]),
        ('heads', 'paper', [('model.heads', '8', '4')]),
        ('heads', 'smoke', []),
        ('decay', 'quickstart', [('optimizer.weight_decay', '0.5', '0.3')]),
        ('triple', 'quickstart', [('optimizer.weight_decay', '0.5', '1.5')]),
        ('as_paper', 'quickstart', [('optimizer.weight_decay', '0.5', '1.5')]),
    ],
)
def test_what_is_said_recorded_and_trained_of_a_row_is_the_same(mine, row, size, changed):
    spec, about, said, _ = load_and_describe(f'{mine}:{row}', [], size)
    assert changes(said) == changed
    assert size in said
    assert changed or all(path in said and str(value) in said for path, value in about['diff'].items())
    config = json.loads(json.dumps(about))['diff']
    for path, value in config.items():
        part, field = path.split('.')
        assert getattr(getattr(spec, part), field) == pytest.approx(value)


def test_a_config_file_is_run_once(mine, tmp_path):
    """It is a program of its author, which may do something."""
    mine.write_text(f"{TABLE}\nwith open({str(tmp_path / 'runs.txt')!r}, 'a') as file:\n    file.write('run ')\n")
    load_and_describe(f'{mine}:decay', [], 'smoke')
    assert (tmp_path / 'runs.txt').read_text() == 'run '
    assert main(['rows', f'--config={mine}', '--size=quickstart']) == 0
    assert (tmp_path / 'runs.txt').read_text() == 'run run '


def test_an_override_is_part_of_what_a_row_comes_to(mine):
    overrides = ['--config.optimizer.weight_decay=0.7', '--config.seed=3']
    _, about, said, _ = load_and_describe(f'{mine}:decay', overrides, 'smoke')
    assert changes(said) == [('optimizer.weight_decay', '0.1', '0.7')]
    assert about['overrides'] == {'optimizer.weight_decay': '0.7', 'seed': '3'}


def test_rows_show_the_values_of_a_size_and_name_those_that_are_equal_to_the_baseline(capsys, mine):
    assert main(['rows', f'--config={mine}', '--size=quickstart', '--json']) == 0
    rows = {row['row']: row for row in json.loads(capsys.readouterr().out)}
    decays = {name: row['diff'].get('optimizer.weight_decay') for name, row in rows.items()}
    decays = {name: value for name, value in decays.items() if value}
    assert decays == pytest.approx({'decay': 0.3, 'triple': 1.5, 'as_paper': 1.5})
    assert {row['size'] for row in rows.values()} == {'quickstart'}
    assert [name for name, row in rows.items() if row['equals_baseline']] == ['softmax', 'heads']
    assert main(['rows', f'--config={mine}', '--size=quickstart']) == 0
    printed = capsys.readouterr().out
    assert 'at size quickstart' in ' '.join(printed.split())
    lines = printed.splitlines()
    (heads,) = (line for line in lines if line.startswith(' heads'))
    assert 'heads=4, as the baseline' in heads


@pytest.mark.parametrize('path', list(list_fields(default.get_config())))
def test_the_value_of_every_field_is_read_from_a_config(path):
    config = default.get_config()
    assert get_diff_value(path, 'as written', config) == dotted(config.to_dict())[path]


def test_a_row_may_set_a_field_that_is_named_like_a_method(capsys, mine):
    mine.write_text(TABLE.replace("{'model.heads': 4}", "{'probe.keys': 5}"))
    assert main(['rows', f'--config={mine}', '--size=quickstart', '--json']) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row['row'] == 'heads')
    assert row['diff'] == {'probe.keys': 5}
    assert main(['rows', f'--config={mine}', '--size=quickstart']) == 0
    assert 'keys=5' in capsys.readouterr().out


@pytest.mark.slow
def test_a_shipped_row_is_listed_with_the_numbers_of_each_size(capsys):
    for size, batch in (('paper', 128), ('quickstart', 8), ('smoke', 1)):
        assert main(['rows', '--config=configs/optimization.py', f'--size={size}', '--json']) == 0
        (row,) = (row for row in json.loads(capsys.readouterr().out) if row['row'] == 'batch_128')
        assert row['diff'] == {'optimizer.batch_size': batch}


def test_a_value_that_a_size_has_no_room_for_is_refused_with_the_sizes_that_have(capsys, mine, tmp_path):
    for verb in (
        ['train', f'--config={mine}:long_warmup'],
        ['sweep', f'--config={mine}', '--rows=softmax,long_warmup'],
    ):
        line = refused(capsys, *verb, '--size=smoke', f'--workdir={tmp_path}/runs')
        assert 'config.optimizer.warmup_steps is 400' in line
        assert '--size=paper or quickstart' in line
    assert load_spec(f'{mine}:long_warmup', [], 'quickstart')[0].optimizer.warmup_steps == 400
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('value', ['18 %', '18.2', None, [18.2]])
def test_a_published_value_that_is_no_number_is_refused_by_every_verb_that_reads_rows(capsys, mine, tmp_path, value):
    mine.write_text(TABLE.replace('18.2', repr(value)))
    for verb in (['rows'], ['sweep', f'--workdir={tmp_path}/runs']):
        line = refused(capsys, *verb, f'--config={mine}')
        assert 'long_warmup' in line
        assert 'sink/1' in line
        assert repr(value) in line
    assert 'sink/1' in refused(capsys, 'train', f'--config={mine}:long_warmup', f'--workdir={tmp_path}/run')


@pytest.mark.parametrize(
    'value',
    [
        {'softmax': '17 %'},
        {'rows': {'softmax': 17}, 'source': 'ours'},
        {'rows': {'softmax': '17 %'}},
        {'rows': '17 %', 'source': 'ours'},
        ['17 %'],
    ],
)
def test_expected_values_of_another_form_are_refused_before_training(capsys, mine, tmp_path, value):
    mine.write_text(f'{TABLE}\nEXPECTED = {value!r}\n')
    given = ['--size=smoke', f'--workdir={tmp_path}/run']
    for verb in (['train', f'--config={mine}:softmax', *given], ['sweep', f'--config={mine}', *given]):
        line = refused(capsys, *verb)
        assert 'EXPECTED' in line
        assert repr(value) in line
    assert not (tmp_path / 'run').exists()


def test_rows_that_are_no_dict_are_refused(capsys, mine, tmp_path):
    mine.write_text(f'{TABLE}\nROWS = [5]\n')
    assert 'ROWS is [5]' in refused(capsys, 'train', f'--config={mine}:softmax', f'--workdir={tmp_path}/run')
    assert 'ROWS is [5]' in refused(capsys, 'rows', f'--config={mine}')


def test_expected_values_are_read_when_a_run_starts(mine):
    mine.write_text(f"{TABLE}\nEXPECTED = {{'rows': {{'softmax': '17 %', 5: '1 %'}}, 'source': 'ours'}}\n")
    assert load_and_describe(f'{mine}:softmax', [], 'paper')[3] == ({'softmax': '17 %', '5': '1 %'}, 'ours')
    assert load_and_describe(f'{mine}:softmax', [], 'smoke')[3] is None


def test_sizes_are_named_where_the_row_is_at_fault_and_not_where_an_override_is(mine):
    with pytest.raises(UserError) as refusal:
        load_spec(f'{mine}:long_warmup', ['--config.optimizer.weight_decay=0.2'], 'smoke')
    assert 'optimizer.warmup_steps, and' in str(refusal.value)
    assert '--size=paper or quickstart' in str(refusal.value)
    for row in ('heads', 'decay'):
        with pytest.raises(UserError) as refusal:
            load_spec(f'{mine}:{row}', ['--config.optimizer.warmup_steps=400'], 'smoke')
        assert '--size' not in str(refusal.value)


def test_sizes_are_named_of_a_field_that_the_refusal_names_in_part(mine):
    """The refusal has 'config.data.end_token and fixed_token'."""
    mine.write_text(TABLE.replace("{'model.heads': 4}", "{'data.tokenizer': 'a/b.json', 'data.fixed_token': 400}"))
    with pytest.raises(UserError) as refusal:
        load_spec(f'{mine}:heads', [], 'smoke')
    assert 'row heads changes data.fixed_token, and' in str(refusal.value)
    assert '--size=paper or quickstart' in str(refusal.value)


@pytest.fixture
def old(tmp_path):
    """The folder of a run that version 0.1 has begun: its row.json has the number of the paper."""
    shutil.copytree(OLD, tmp_path / 'runs' / OLD.name)
    return RunDir(tmp_path / 'runs' / OLD.name)


def old_runs(old):
    def load_row(row, seed):
        return load_spec(f'configs/optimization.py:{row}', sweep.format_seed_flags(seed), 'quickstart')

    return plan.plan_runs(['decay_0.5'], [0], str(old.path.parent), load_row, Hardware())


def test_a_run_of_version_0_1_of_a_shipped_row_is_gone_on_with(old):
    assert old.read_json('row')['diff'] == {'optimizer.weight_decay': 0.5}
    (run,) = old_runs(old)
    assert (run.outcome, run.spec.optimizer.weight_decay) == ('to do', 2.5)
    before = (old.path / 'row.json').read_bytes()
    old.initialize(run.spec, load_spec('configs/optimization.py:decay_0.5', [], 'quickstart')[1])
    assert (old.path / 'row.json').read_bytes() == before


def test_a_folder_that_holds_another_row_has_the_advice_of_a_sweep(capsys, mine, tmp_path):
    folder = RunDir(tmp_path / 'runs' / 'decay-0')
    folder.initialize(*load_spec(f'{mine}:decay', sweep.format_seed_flags(0), 'smoke'))
    mine.write_text(TABLE.replace("'optimizer.weight_decay': 0.3}, p", "'optimizer.weight_decay': 0.4}, p"))
    given = [f'--config={mine}', '--rows=decay', '--size=smoke', f'--workdir={tmp_path}/runs']
    line = refused(capsys, 'sweep', *given)
    assert 'optimizer.weight_decay 0.3 -> 0.4' in line
    assert 'another --workdir' in line
    assert f'move {folder} away' in line
    assert 'decay-0-2' not in line
    assert 'scale_with_size' not in line
    line = refused(capsys, 'train', f'--config={mine}:decay', '--size=smoke', f'--workdir={folder}')
    assert f'--workdir={folder}-2' in line


def test_a_run_that_was_scaled_by_version_0_1_is_explained(capsys, mine, tmp_path):
    folder, options = RunDir(tmp_path / 'runs' / 'decay-0'), sweep.format_seed_flags(0)
    scaled, _ = load_spec(f'{mine}:as_paper', options, 'quickstart')
    _, about = load_spec(f'{mine}:decay', options, 'quickstart')
    folder.initialize(scaled, about)
    given = [f'--config={mine}', '--rows=decay', '--size=quickstart', f'--workdir={tmp_path}/runs']
    assert "scale_with_size({'optimizer.weight_decay': 0.3})" in refused(capsys, 'sweep', *given)


@pytest.mark.parametrize(
    ('given', 'seeds'),
    [('1', [0]), ('3', [0, 1, 2]), ('2,', [2]), ('0,', [0]), ('0,1,2', [0, 1, 2]), ('5,3', [5, 3]), ('5,3,', [5, 3])],
)
def test_a_number_is_a_count_of_seeds_and_numbers_with_commas_are_seeds(given, seeds):
    assert parse_seeds(given) == seeds


@pytest.mark.parametrize('given', ['5000000000', '5000000000,', '4294967296,', '9' * 5000, '0,' * 2, '', ',', '1,,2'])
def test_what_stands_for_no_seeds_is_refused(given):
    with pytest.raises(UserError, match='give a count'):
        parse_seeds(given)


def test_the_help_of_seeds_has_examples_that_are_read_as_it_says():
    listed = re.findall(r"'([\d,]+)'", SEEDS_HELP)
    assert [parse_seeds(given) for given in ('3', *listed)] == [[0, 1, 2], [0, 2, 5], [2]]


def test_a_count_is_refused_where_the_folder_was_begun_with_that_seed_alone(capsys, mine, tmp_path):
    for seed in (2, 4):
        spec, about = load_spec(f'{mine}:softmax', sweep.format_seed_flags(seed), 'smoke')
        RunDir(tmp_path / 'runs' / f'softmax-{seed}').initialize(spec, about)
    given = [f'--config={mine}', '--rows=softmax', '--size=smoke', f'--workdir={tmp_path}/runs']
    line = refused(capsys, 'sweep', *given, '--seeds=2')
    assert 'seeds 0, 1' in line
    assert line.endswith('--seeds=2,')
    plan.check_seed_count('2,', ['softmax'], f'{tmp_path}/runs')
    plan.check_seed_count('3', ['softmax'], f'{tmp_path}/runs')
    plan.check_seed_count('4', ['softmax'], f'{tmp_path}/runs')
