"""Tests of rows in a user's config file, and of the rows and seeds of a sweep."""

import json
import re
import shutil
from pathlib import Path

import pytest

from sinklab.cli import sweep
from sinklab.cli.config_flags import get_diff_value, load_and_describe, load_row_info, load_spec
from sinklab.cli.main import main
from sinklab.config.differences import flatten_dict as flatten_config
from sinklab.config.seed_list import SEEDS_HELP, parse_seeds
from sinklab.config.spec import Hardware
from sinklab.configs import default
from sinklab.configs.table import list_fields
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.sweep import plan

OLD_RUN_PATH = Path(__file__).parent / 'released' / 'decay_0.5-0'  # row.json and config.json of version 0.1
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
def config_file(tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(TABLE)
    return path


def run_failing_command(capsys, *arguments):
    """Run a command that must fail; return its only line on stderr."""
    assert main(list(arguments)) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def parse_changes(description):
    """Return each (field, value of the baseline, value of the row) in a description of a row."""
    return re.findall(r'([a-z_.]+) (\S+) -> ([^;\s]+)', description)


@pytest.mark.parametrize(
    ('row', 'size', 'changes'),
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
def test_row_diff_is_equal_in_description_record_and_spec(config_file, row, size, changes):
    spec, record, description, _ = load_and_describe(f'{config_file}:{row}', [], size)
    assert parse_changes(description) == changes
    assert size in description
    assert changes or all(path in description and str(value) in description for path, value in record['diff'].items())
    diff = json.loads(json.dumps(record))['diff']
    for path, value in diff.items():
        part, field = path.split('.')
        assert getattr(getattr(spec, part), field) == pytest.approx(value)


def test_config_file_is_executed_once(config_file, tmp_path):
    """Test that side effects of a config file happen once."""
    config_file.write_text(
        f"{TABLE}\nwith open({str(tmp_path / 'runs.txt')!r}, 'a') as file:\n    file.write('run ')\n"
    )
    load_and_describe(f'{config_file}:decay', [], 'smoke')
    assert (tmp_path / 'runs.txt').read_text() == 'run '
    assert main(['rows', f'--config={config_file}', '--size=quickstart']) == 0
    assert (tmp_path / 'runs.txt').read_text() == 'run run '


def test_row_description_includes_override(config_file):
    overrides = ['--config.optimizer.weight_decay=0.7', '--config.seed=3']
    _, record, description, _ = load_and_describe(f'{config_file}:decay', overrides, 'smoke')
    assert parse_changes(description) == [('optimizer.weight_decay', '0.1', '0.7')]
    assert record['overrides'] == {'optimizer.weight_decay': '0.7', 'seed': '3'}


def test_rows_command_lists_values_of_size_and_marks_rows_equal_to_baseline(capsys, config_file):
    assert main(['rows', f'--config={config_file}', '--size=quickstart', '--json']) == 0
    rows = {row['row']: row for row in json.loads(capsys.readouterr().out)}
    decays = {name: row['diff'].get('optimizer.weight_decay') for name, row in rows.items()}
    decays = {name: value for name, value in decays.items() if value}
    assert decays == pytest.approx({'decay': 0.3, 'triple': 1.5, 'as_paper': 1.5})
    assert {row['size'] for row in rows.values()} == {'quickstart'}
    assert [name for name, row in rows.items() if row['equals_baseline']] == ['softmax', 'heads']
    assert main(['rows', f'--config={config_file}', '--size=quickstart']) == 0
    output = capsys.readouterr().out
    assert 'quickstart' in ' '.join(output.split())
    lines = output.splitlines()
    (heads,) = (line for line in lines if line.startswith(' heads'))
    assert 'heads=4' in heads
    assert 'baseline' in heads


@pytest.mark.parametrize('path', list(list_fields(default.get_config())))
def test_get_diff_value_reads_every_config_field(path):
    config = default.get_config()
    assert get_diff_value(path, 'as written', config) == flatten_config(config.to_dict())[path]


def test_load_row_info_reads_row_name_with_colon(config_file):
    config_file.write_text(TABLE.replace("'heads'", "'heads:4'"))
    assert load_row_info(f'{config_file}:heads:4')['diff'] == {'model.heads': 4}


def test_rows_command_lists_field_named_like_dict_method(capsys, config_file):
    config_file.write_text(TABLE.replace("{'model.heads': 4}", "{'probe.keys': 5}"))
    assert main(['rows', f'--config={config_file}', '--size=quickstart', '--json']) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row['row'] == 'heads')
    assert row['diff'] == {'probe.keys': 5}
    assert main(['rows', f'--config={config_file}', '--size=quickstart']) == 0
    assert 'keys=5' in capsys.readouterr().out


@pytest.mark.slow
def test_rows_command_lists_values_of_each_size_for_shipped_row(capsys):
    for size, batch in (('paper', 128), ('quickstart', 8), ('smoke', 1)):
        assert main(['rows', '--config=configs/optimization.py', f'--size={size}', '--json']) == 0
        (row,) = (row for row in json.loads(capsys.readouterr().out) if row['row'] == 'batch_128')
        assert row['diff'] == {'optimizer.batch_size': batch}


def test_row_invalid_at_size_is_rejected_with_valid_sizes(capsys, config_file, tmp_path):
    for command in (
        ['train', f'--config={config_file}:long_warmup'],
        ['sweep', f'--config={config_file}', '--rows=softmax,long_warmup'],
    ):
        line = run_failing_command(capsys, *command, '--size=smoke', f'--workdir={tmp_path}/runs')
        assert re.search(r'config\.optimizer\.warmup_steps.*400', line)
        assert re.search('--size=paper.*quickstart', line)
    assert load_spec(f'{config_file}:long_warmup', [], 'quickstart')[0].optimizer.warmup_steps == 400
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('value', ['18 %', '18.2', None, [18.2]])
def test_non_numeric_published_value_is_rejected_by_every_command(capsys, config_file, tmp_path, value):
    config_file.write_text(TABLE.replace('18.2', repr(value)))
    for command in (['rows'], ['sweep', f'--workdir={tmp_path}/runs']):
        line = run_failing_command(capsys, *command, f'--config={config_file}')
        assert 'long_warmup' in line
        assert 'sink/1' in line
        assert repr(value) in line
    assert 'sink/1' in run_failing_command(
        capsys, 'train', f'--config={config_file}:long_warmup', f'--workdir={tmp_path}/run'
    )


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
def test_malformed_expected_values_are_rejected_before_training(capsys, config_file, tmp_path, value):
    config_file.write_text(f'{TABLE}\nEXPECTED = {value!r}\n')
    flags = ['--size=smoke', f'--workdir={tmp_path}/run']
    for command in (
        ['train', f'--config={config_file}:softmax', *flags],
        ['sweep', f'--config={config_file}', *flags],
    ):
        line = run_failing_command(capsys, *command)
        assert 'EXPECTED' in line
        assert repr(value) in line
    assert not (tmp_path / 'run').exists()


def test_table_with_rows_of_wrong_type_is_rejected(capsys, config_file, tmp_path):
    config_file.write_text(f'{TABLE}\nROWS = [5]\n')
    assert re.search(
        r'ROWS.*\[5\]',
        run_failing_command(capsys, 'train', f'--config={config_file}:softmax', f'--workdir={tmp_path}/run'),
    )
    assert re.search(r'ROWS.*\[5\]', run_failing_command(capsys, 'rows', f'--config={config_file}'))


def test_expected_values_are_loaded_for_paper_size_only(config_file):
    config_file.write_text(f"{TABLE}\nEXPECTED = {{'rows': {{'softmax': '17 %', 5: '1 %'}}, 'source': 'ours'}}\n")
    assert load_and_describe(f'{config_file}:softmax', [], 'paper')[3] == ({'softmax': '17 %', '5': '1 %'}, 'ours')
    assert load_and_describe(f'{config_file}:softmax', [], 'smoke')[3] is None


def test_error_lists_valid_sizes_for_row_values_but_not_for_overrides(config_file):
    with pytest.raises(UserError) as exc_info:
        load_spec(f'{config_file}:long_warmup', ['--config.optimizer.weight_decay=0.2'], 'smoke')
    assert 'optimizer.warmup_steps' in str(exc_info.value)
    assert re.search('--size=paper.*quickstart', str(exc_info.value))
    for row in ('heads', 'decay'):
        with pytest.raises(UserError) as exc_info:
            load_spec(f'{config_file}:{row}', ['--config.optimizer.warmup_steps=400'], 'smoke')
        assert '--size' not in str(exc_info.value)


def test_error_lists_valid_sizes_for_field_named_by_its_last_part(config_file):
    """Test an error that names 'config.data.end_token and fixed_token'."""
    config_file.write_text(
        TABLE.replace("{'model.heads': 4}", "{'data.tokenizer': 'a/b.json', 'data.fixed_token': 400}")
    )
    with pytest.raises(UserError) as exc_info:
        load_spec(f'{config_file}:heads', [], 'smoke')
    assert re.search(r'heads.*data\.fixed_token', str(exc_info.value))
    assert re.search('--size=paper.*quickstart', str(exc_info.value))


@pytest.fixture
def old_run(tmp_path):
    """Return the folder of a run started by version 0.1, whose row.json has the number of the paper."""
    shutil.copytree(OLD_RUN_PATH, tmp_path / 'runs' / OLD_RUN_PATH.name)
    return RunDir(tmp_path / 'runs' / OLD_RUN_PATH.name)


def plan_old_runs(old_run):
    def load_row(row, seed):
        return load_spec(f'configs/optimization.py:{row}', sweep.format_seed_flags(seed), 'quickstart')

    return plan.plan_runs(['decay_0.5'], [0], str(old_run.path.parent), load_row, Hardware())


def test_run_of_version_0_1_is_resumed_with_unchanged_row_file(old_run):
    assert old_run.read_json('row')['diff'] == {'optimizer.weight_decay': 0.5}
    (run,) = plan_old_runs(old_run)
    assert (run.outcome, run.spec.optimizer.weight_decay) == ('to do', 2.5)
    old_content = (old_run.path / 'row.json').read_bytes()
    old_run.initialize(run.spec, load_spec('configs/optimization.py:decay_0.5', [], 'quickstart')[1])
    assert (old_run.path / 'row.json').read_bytes() == old_content


def test_sweep_and_train_reject_folder_of_changed_row_with_remedy(capsys, config_file, tmp_path):
    folder = RunDir(tmp_path / 'runs' / 'decay-0')
    folder.initialize(*load_spec(f'{config_file}:decay', sweep.format_seed_flags(0), 'smoke'))
    config_file.write_text(TABLE.replace("'optimizer.weight_decay': 0.3}, p", "'optimizer.weight_decay': 0.4}, p"))
    flags = [f'--config={config_file}', '--rows=decay', '--size=smoke', f'--workdir={tmp_path}/runs']
    line = run_failing_command(capsys, 'sweep', *flags)
    assert 'optimizer.weight_decay 0.3 -> 0.4' in line
    assert '--workdir' in line
    assert str(folder) in line
    assert 'decay-0-2' not in line
    assert 'scale_with_size' not in line
    line = run_failing_command(
        capsys, 'train', f'--config={config_file}:decay', '--size=smoke', f'--workdir={folder}'
    )
    assert f'--workdir={folder}-2' in line


def test_sweep_error_for_run_scaled_by_version_0_1_names_scale_with_size(capsys, config_file, tmp_path):
    folder, options = RunDir(tmp_path / 'runs' / 'decay-0'), sweep.format_seed_flags(0)
    scaled_spec, _ = load_spec(f'{config_file}:as_paper', options, 'quickstart')
    _, record = load_spec(f'{config_file}:decay', options, 'quickstart')
    folder.initialize(scaled_spec, record)
    flags = [f'--config={config_file}', '--rows=decay', '--size=quickstart', f'--workdir={tmp_path}/runs']
    assert "scale_with_size({'optimizer.weight_decay': 0.3})" in run_failing_command(capsys, 'sweep', *flags)


@pytest.mark.parametrize(
    ('text', 'seeds'),
    [('1', [0]), ('3', [0, 1, 2]), ('2,', [2]), ('0,', [0]), ('0,1,2', [0, 1, 2]), ('5,3', [5, 3]), ('5,3,', [5, 3])],
)
def test_parse_seeds_reads_number_as_count_and_commas_as_list(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize('text', ['5000000000', '5000000000,', '4294967296,', '9' * 5000, '0,' * 2, '', ',', '1,,2'])
def test_parse_seeds_rejects_invalid_values(text):
    with pytest.raises(UserError, match=rf'^--seeds={re.escape(text)}[: ]'):
        parse_seeds(text)


def test_parse_seeds_accepts_examples_of_help_text():
    examples = re.findall(r"'([\d,]+)'", SEEDS_HELP)
    assert [parse_seeds(text) for text in ('3', *examples)] == [[0, 1, 2], [0, 2, 5], [2]]


def test_seed_count_is_rejected_if_folder_has_only_run_with_that_seed(capsys, config_file, tmp_path):
    for seed in (2, 4):
        spec, record = load_spec(f'{config_file}:softmax', sweep.format_seed_flags(seed), 'smoke')
        RunDir(tmp_path / 'runs' / f'softmax-{seed}').initialize(spec, record)
    flags = [f'--config={config_file}', '--rows=softmax', '--size=smoke', f'--workdir={tmp_path}/runs']
    line = run_failing_command(capsys, 'sweep', *flags, '--seeds=2')
    assert '0, 1' in line
    assert line.endswith('--seeds=2,')
    plan.check_seed_count('2,', ['softmax'], f'{tmp_path}/runs')
    plan.check_seed_count('3', ['softmax'], f'{tmp_path}/runs')
    plan.check_seed_count('4', ['softmax'], f'{tmp_path}/runs')


def test_unknown_key_of_row_is_rejected_with_suggestion(tmp_path):
    file = tmp_path / 'mine.py'
    rows = "ROWS = {'softmax': dict(diff={}, publishd={}, source='ours')}"
    file.write_text(f'from sinklab.configs.table import table\n{rows}\nget_config = table(ROWS)\n')
    with pytest.raises(UserError, match=r'softmax.*publishd.*published'):
        load_spec(f'{file}:softmax', [], 'smoke')
