"""Rows, metrics and FFN activations of a user's file, and the rows and seeds of a sweep."""

import argparse
import json
import re

import numpy as np
import pytest
from commands import get_error_line
from tiny_runs import read_contents
from tiny_specs import make_tiny_spec

from sinklab.cli import sweep
from sinklab.cli.config_flags import (
    describe_changes,
    hash_registering_files,
    load_config_module,
    load_metric_file,
    load_spec,
)
from sinklab.cli.main import main
from sinklab.config.seed_list import parse_seeds
from sinklab.config.spec import FFN_NAMES, REGISTERED
from sinklab.errors import UserError
from sinklab.metrics import registry
from sinklab.metrics.metric import Metric, make_context
from sinklab.model.layers import FFN_ACTIVATIONS
from sinklab.run_dir import RunDir, read_spec

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
REGISTRATION = """
from sinklab.metrics.metric import MetricInfo, make_head_metric
from sinklab.metrics.registry import register_metric
from sinklab.model.layers import register_ffn_activation
register_ffn_activation('double', lambda x: 2 * x)
register_metric(make_head_metric('own', lambda query_LPTHK, context: query_LPTHK[..., 0].mean(2),
    (MetricInfo('alpha/own', 'own', 'Mean.'),), inputs=('query_LPTHK',)))
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(TABLE)
    return path


@pytest.fixture
def own_file(tmp_path):
    """A file that registers a metric and an activation; they are removed at the end."""
    tables = registry.METRICS, registry.METRIC_INFOS, registry.FIGURES, FFN_NAMES
    saved = [list(table) for table in tables]
    saved_activations = dict(FFN_ACTIVATIONS)
    path = tmp_path / 'own.py'
    path.write_text(REGISTRATION)
    yield path
    for table, entries in zip(tables, saved, strict=True):
        table[:] = entries
    for registered in (FFN_ACTIVATIONS, REGISTERED):
        registered.clear()
    FFN_ACTIVATIONS.update(saved_activations)


def load_changes(config_path, overrides, size):
    """Return each (field, value of the baseline, value of the row) in the description of a row, and its record."""
    module = load_config_module(config_path.partition(':')[0])
    spec, record = load_spec(config_path, overrides, size, module)
    description = describe_changes(module, spec, size)
    assert description.startswith(f'at size {size}: ')
    changes = re.findall(r'([a-z_.]+) (\S+) -> ([^;\s]+)', description)
    return changes, record


def test_normalizer_that_stays_is_named_beside_another_similarity(config_file):
    module = load_config_module(str(config_file))
    spec, _ = load_spec(f'{config_file}:softmax', ['--config.model.attention.similarity=sigmoid'], 'smoke', module)
    assert 'sigmoid, model.attention.normalizer stays sum' in describe_changes(module, spec, 'smoke')


def test_description_of_offset_names_its_factor():
    module = load_config_module('configs/attention.py')
    spec, _ = load_spec('configs/attention.py:sigmoid_minus_log_t', [])
    assert 'offset 0 -> -1 (times log T)' in describe_changes(module, spec, None)


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
    described_changes, record = load_changes(f'{config_file}:{row}', [], size)
    assert described_changes == changes
    spec, _ = load_spec(f'{config_file}:{row}', [], size)
    for path, value in json.loads(json.dumps(record))['diff'].items():
        part, field = path.split('.')
        assert getattr(getattr(spec, part), field) == pytest.approx(value)


def test_description_resolves_kv_heads(config_file):
    changes, _ = load_changes(f'{config_file}:softmax', ['--config.model.kv_heads=2'], 'quickstart')
    assert changes == [('model.kv_heads', '4', '2')]


def test_description_of_row_has_overrides(config_file):
    overrides = ['--config.optimizer.weight_decay=0.7', '--config.seed=3']
    changes, record = load_changes(f'{config_file}:decay', overrides, 'smoke')
    assert changes == [('optimizer.weight_decay', '0.1', '0.7')]
    assert record['overrides'] == {'optimizer.weight_decay': '0.7', 'seed': '3'}


def test_rows_command_lists_values_of_size_and_marks_rows_equal_to_baseline(capsys, config_file):
    assert main(['rows', f'--config={config_file}', '--size=quickstart', '--json']) == 0
    rows = {row['row']: row for row in json.loads(capsys.readouterr().out)}
    decays = {name: row['diff'].get('optimizer.weight_decay') for name, row in rows.items()}
    decays = {name: value for name, value in decays.items() if value}
    assert decays == pytest.approx({'decay': 0.3, 'triple': 1.5, 'as_paper': 1.5})
    assert [name for name, row in rows.items() if row['equals_baseline']] == ['softmax', 'heads']
    assert main(['rows', f'--config={config_file}', '--size=quickstart']) == 0
    (heads,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(' heads'))
    assert 'heads=4, as the baseline' in heads


def test_row_name_may_contain_a_colon(config_file):
    config_file.write_text(TABLE.replace("'heads'", "'heads:4'"))
    assert load_spec(f'{config_file}:heads:4', [])[1]['diff'] == {'model.heads': 4}


def test_field_named_like_a_method_is_set_by_rows_and_overrides(config_file):
    config_file.write_text(TABLE.replace("{'model.heads': 4}", "{'probe.keys': 5}"))
    assert load_spec(f'{config_file}:heads', [], 'quickstart')[1]['diff'] == {'probe.keys': 5}
    spec, _ = load_spec(f'{config_file}:softmax', ['--config.probe.keys=5'], 'quickstart')
    assert spec.probe.keys == 5


@pytest.mark.parametrize(
    ('old', 'new', 'names'),
    [
        ('18.2', "'18 %'", ['long_warmup', 'published', 'sink/1']),
        ('18.2', "float('nan')", ['long_warmup', 'published', 'sink/1']),
        ('published=', 'publishd=', ['softmax', 'publishd']),
        ('get_config =', 'ROWS = [5]\nget_config =', ['ROWS']),
    ],
)
def test_malformed_table_is_refused_by_every_command(capsys, config_file, tmp_path, old, new, names):
    config_file.write_text(TABLE.replace(old, new))
    commands = [['rows'], ['sweep', f'--workdir={tmp_path}/runs']]
    for command in [*commands, ['train', f'--workdir={tmp_path}/run']]:
        row = ':long_warmup' if command[0] == 'train' else ''
        line = get_error_line(capsys, *command, f'--config={config_file}{row}')
        assert [name for name in [str(config_file), *names] if name not in line] == []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_sweep_and_train_refuse_folder_of_changed_row(capsys, config_file, tmp_path):
    folder = RunDir(tmp_path / 'runs' / 'decay-0')
    folder.initialize(*load_spec(f'{config_file}:decay', sweep.format_seed_flags(0), 'smoke'))
    config_file.write_text(TABLE.replace("'optimizer.weight_decay': 0.3}, p", "'optimizer.weight_decay': 0.4}, p"))
    contents = read_contents(folder.path)
    flags = [f'--config={config_file}', '--rows=decay', '--size=smoke', f'--workdir={tmp_path}/runs']
    line = get_error_line(capsys, 'sweep', *flags)
    assert [
        text for text in ('optimizer.weight_decay 0.3 -> 0.4', '--workdir', str(folder)) if text not in line
    ] == []
    flags = [f'--config={config_file}:decay', '--size=smoke', f'--workdir={folder}']
    assert '--workdir' in get_error_line(capsys, 'train', *flags)
    assert read_contents(folder.path) == contents


@pytest.mark.parametrize(
    ('text', 'seeds'),
    [('1', [0]), ('3', [0, 1, 2]), ('2,', [2]), ('0,', [0]), ('0,1,2', [0, 1, 2]), ('5,3', [5, 3]), ('5,3,', [5, 3])],
)
def test_parse_seeds_reads_number_as_count_and_commas_as_list(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    'text', ['0', '1001', '4294967296,', '9' * 5000, '1,1', '', ',', '1,,2', '0,x', '2.0', '-1', '٣']
)
def test_parse_seeds_refuses_invalid_text_in_one_line(text):
    with pytest.raises(UserError, match=rf'^--seeds={re.escape(text)}[: ]') as error:
        parse_seeds(text)
    assert '\n' not in str(error.value)


def test_names_of_user_are_those_of_the_last_file(own_file, tmp_path):
    load_metric_file(str(own_file))
    other_file = tmp_path / 'other.py'
    other_file.write_text(REGISTRATION.replace('2 * x', '3 * x').replace('Mean.', 'Average.'))
    load_metric_file(str(other_file))
    assert FFN_ACTIVATIONS['double'][0](1) == 3
    assert [metric for metric in registry.METRICS if 'own_LH' in metric.saved_arrays] == [registry.METRICS[-1]]
    assert registry.find_metric_info('alpha/own').description == 'Average.'
    assert make_tiny_spec(model__ffn='double').model.ffn == 'double'


@pytest.mark.parametrize(
    ('old', 'new', 'names'),
    [
        ('alpha/own', 'sink/2', ['sink/2']),
        ('alpha/own', 'valid/loss', ['valid/loss']),
        ('double', 'swiglu', ['swiglu']),
        ("'own', lambda", "'contribution', lambda", ['contribution_LH']),
        ("'query_LPTHK',", "'queries',", ['queries', 'query_LPTHK']),
        ('register_', 'len # ', []),
        ('metric(', 'metric((', ['own.py']),
    ],
)
def test_own_file_with_errors_is_refused_in_one_line(capsys, own_file, tmp_path, old, new, names):
    own_file.write_text(REGISTRATION.replace(old, new))
    flags = ['--config=configs/quickstart.py:softmax', '--size=smoke', f'--workdir={tmp_path}/run']
    line = get_error_line(capsys, 'train', *flags, f'--metric={own_file}')
    assert [name for name in [f'--metric={own_file}', *names] if name not in line] == []
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('array', 'saved_name', 'names'),
    [
        (np.ones((2, 4)), 'own_LH', ['own_LPH', '(2, 4)']),
        (0.5, 'own_LH', ['own_LPH', '()']),
        (np.ones((1, 2, 4)), 'ow_LH', ['ow_LH', 'own_LPH']),
    ],
)
def test_metric_with_wrong_array_is_refused(array, saved_name, names):
    metric = Metric(compute_arrays=lambda context: {'own_LPH': array}, saved_arrays=(saved_name,))
    with pytest.raises(UserError) as error:
        registry.compute_arrays({}, make_context(make_tiny_spec(), 3, 0), [metric])
    assert [text for text in names if text not in str(error.value)] == []


def test_registering_files_are_compared_by_content(own_file, tmp_path):
    copies = [tmp_path / name / 'own.py' for name in 'ab']
    for copy, text in zip(copies, (REGISTRATION, REGISTRATION.replace('2 * x', '3 * x')), strict=True):
        copy.parent.mkdir()
        copy.write_text(text)
    files = [own_file, *copies]
    args = [argparse.Namespace(metric=str(file), config='configs/quickstart.py:softmax') for file in files]
    assert list(map(hash_registering_files, args)) == [{}] * 3
    load_metric_file(str(own_file))
    own, equal, other = (hash_registering_files(each)['--metric own.py'] for each in args)
    assert own == equal != other


def test_folder_of_runs_is_refused_with_their_paths(capsys, tmp_path):
    for name in ('a', 'sweep/b'):
        RunDir(tmp_path / name).initialize(make_tiny_spec(), {})
    line = get_error_line(capsys, 'measure', str(tmp_path))
    assert f'{tmp_path}/a' in line
    assert f'{tmp_path}/sweep/b' in line


def test_run_with_own_activation_names_the_flag_where_it_is_unknown(own_file, tmp_path):
    load_metric_file(str(own_file))
    run_dir = RunDir(tmp_path / 'run')
    run_dir.initialize(make_tiny_spec(model__ffn='double'), {})
    assert read_spec(run_dir).model.ffn == 'double'
    FFN_NAMES.remove('double')
    with pytest.raises(UserError) as error:
        read_spec(run_dir)
    assert [text for text in (str(run_dir), 'double', '--metric=') if text not in str(error.value)] == []
