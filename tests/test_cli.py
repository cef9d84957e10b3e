"""Command line: one-line errors, exit codes, help and listings."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from commands import get_error_line, write_table

from sinklab.cli.config_flags import load_spec
from sinklab.cli.main import COMMANDS, build_parser, import_command, main
from sinklab.errors import UserError

QUICKSTART_CONFIG = 'configs/quickstart.py:softmax'


@pytest.mark.parametrize(
    ('argument', 'texts'),
    [
        ('--config.optimizer.stps=5', ['config.optimizer.stps', 'mean config.optimizer.steps?', 'optimizer.epsilon']),
        ('--config.optimzer.steps=5', ['config.optimzer.steps', 'mean config.optimizer.steps?']),
        ('--config.optimizer=5', ['config.optimizer ', 'optimizer.steps']),
        ('--config.optimizer.steps=many', ['config.optimizer.steps', "'many'", 'whole number of at least 1']),
        ('--config.optimizer.steps=1.5', ['config.optimizer.steps', '1.5', 'whole number']),
        ('--config.optimizer.clip_norm=x', ['config.optimizer.clip_norm', "'x'", 'above 0, or None']),
        ('--config.model.qk_norm=maybe', ['config.model.qk_norm', "'maybe'", 'True or False']),
        ('--config.model.attention.similarity=sigmod', ["'sigmod'", 'mean sigmoid?', 'exp, softpick']),
        ('--config.data.source=text:/nowhere/*.txt', ['/nowhere/*.txt']),
        ('--config.model.atention=softmax', ['mean config.model.attention?']),
        ('--size=paper', ['config.data.source=stdlib', 'config.valid.windows=800']),
        ('--config.data.source=web:x', ['web:x', 'stdlib, text:GLOB']),
        ('--config.seed', ['--config.seed']),
        ('--config.optimizer.batch_size=1000000000', ['1000000000', 'GiB']),
        ('--data=3', ['3 devices']),
        ('--data=0', ['--data', '0', 'at least 1']),
        ('--data=8', ['--data=8', '4 devices']),
        ('--tensor=8', ['--tensor=8', '4 devices']),
        ('--attention=tpu', ['tpu', 'cpu', 'auto, dense, chunked']),
        ('--attention=flash', ["'flash'", "'chunked'"]),
        ('--micro_batch=5', ['--micro_batch=5']),
        ('--micro_batch=all', ['--micro_batch', 'all', 'none or default']),
        (f'--compiled={__file__}', ['--compiled', 'none']),
        ('--remat=some', ['--remat', 'some', 'qkv']),
        ('--steps=5', ['--steps=5', 'mean --config.optimizer.steps?']),
        ('--size=smoek', ["'smoek'", 'mean smoke?', 'paper, quickstart, small, smoke']),
    ],
)
def test_train_refuses_invalid_argument_with_one_line_and_creates_no_run(capsys, tmp_path, argument, texts):
    line = get_error_line(capsys, 'train', f'--config={QUICKSTART_CONFIG}', f'--workdir={tmp_path}/run', argument)
    assert [text for text in texts if text not in line] == []
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('config_path', 'texts'),
    [
        ('configs/quickstart.py', ['FILE.py:softmax', 'rows: softmax, ']),
        ('configs/quickstart.py:sigmod', ["'sigmod'", 'mean sigmoid?', 'rows: softmax, ']),
        ('configs/default.py:x', ["'x'"]),
        (
            'configs/quickstat.py:softmax',
            ['configs/quickstat.py', 'mean configs/quickstart.py?', 'configs/blocks.py'],
        ),
        ('README.md', ['README.md', 'configs/blocks.py']),
        ('configs/table.py:x', ['configs/table.py', 'get_config']),
    ],
)
def test_train_refuses_unknown_config_or_row(capsys, tmp_path, config_path, texts):
    line = get_error_line(capsys, 'train', f'--config={config_path}', f'--workdir={tmp_path}/run')
    assert [text for text in texts if text not in line] == []


def test_overrides_keep_field_types():
    spec, row = load_spec(
        QUICKSTART_CONFIG,
        [
            '--config.optimizer.peak_learning_rate=1',
            '--config.optimizer.steps=200',
            '--config.data.fixed_position=None',
            '--config.data.source=text:a=b',
            '--config.optimizer.final_share=0.1',
        ],
    )
    assert spec.optimizer.peak_learning_rate == 1.0
    assert spec.optimizer.steps == 200
    assert spec.data.fixed_position is None
    assert spec.data.source == 'text:a=b'
    assert row['row'] == 'softmax'
    assert row['overrides']['optimizer.steps'] == '200'
    assert row['published']['sink/1'] == 18.18
    assert row['size'] == 'quickstart'
    assert load_spec('configs/attention.py:softmax', [])[1]['size'] == 'paper'


def test_size_flag_changes_model_size_but_not_attention():
    (default_spec, default_row), (smoke_spec, smoke_row) = (
        load_spec(QUICKSTART_CONFIG, []),
        load_spec(QUICKSTART_CONFIG, ['--config.optimizer.steps=5'], 'smoke'),
    )
    assert (smoke_spec.model.layers, smoke_spec.optimizer.steps) == (2, 5)
    assert smoke_spec.model.attention == default_spec.model.attention
    assert {name for name in default_row if default_row[name] != smoke_row[name]} == {'size', 'overrides'}


def test_size_flag_is_refused_for_config_without_sizes(capsys, tmp_path, config):
    assert load_spec(config, [])[1]['size'] is None
    line = get_error_line(capsys, 'train', f'--config={config}', '--size=smoke', f'--workdir={tmp_path}/run')
    assert '--size=smoke' in line
    assert f'--config={config}' in line


@pytest.mark.slow
def test_rows_json_lists_published_values(capsys):
    assert main(['rows', '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        fields = {'config', 'row', 'diff', 'published', 'source', 'size', 'equals_baseline'}
        assert set(row) - {'note', 'not_measured'} == fields
    [softpick] = [row for row in rows if (row['config'], row['row']) == ('configs/attention.py', 'softpick')]
    assert softpick['not_measured'] == ['sink_rate', 'kurtosis']
    assert main(['rows', '--config=configs/quickstart.py', '--json']) == 0
    table = json.loads(capsys.readouterr().out)
    assert table == [row for row in rows if row['config'] == 'configs/quickstart.py']
    softmax, _, sigmoid = table[:3]
    assert (softmax['row'], softmax['published']) == ('softmax', {'sink/1': 18.18, 'valid/loss': 3.73})
    assert sigmoid['diff'] == {'model.attention.similarity': 'sigmoid', 'model.attention.normalizer': 'none'}


@pytest.mark.slow
def test_rows_table_fits_100_columns(capsys):
    assert main(['rows']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any('softmax' in line and 'Sink_1 18.18  loss 3.73' in line for line in lines)


def test_rows_lists_user_table_and_refuses_config_without_rows(capsys, tmp_path, config):
    row = dict(diff={'seed': 1}, published={'fails': True}, source='me', note='not so sure [1]')
    config_file = write_table(tmp_path / 'table.py', {'one': row})
    assert main(['rows', f'--config={config_file}']) == 0
    output = capsys.readouterr().out
    assert 'one  seed=1   fails      me ' in output
    assert 'not so sure [1]' in output
    assert f'--config={config}' in get_error_line(capsys, 'rows', f'--config={config}')
    assert '--config=nowhere.py' in get_error_line(capsys, 'rows', '--config=nowhere.py')
    assert '--row=x' in get_error_line(capsys, 'rows', '--row=x')


def test_rows_lists_and_checks_only_the_row_of_config(capsys, tmp_path):
    rows = {name: dict(diff=diff) for name, diff in {'fine': {'seed': 1}, 'misspelt': {'sed': 5}}.items()}
    config_file = write_table(tmp_path / 'mine.py', rows)
    assert main(['rows', f'--config={config_file}:fine', '--json']) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row['row'], row['diff']) == ('fine', {'seed': 1})
    assert main(['rows', f'--config={config_file}:misspelt']) == 1
    assert f'{config_file}:misspelt is refused' in capsys.readouterr().err


def test_rows_reports_invalid_rows_as_refused(capsys, tmp_path):
    diffs = {'fine': {}, 'misspelt': {'optimizer.stps': 5}, 'typed': {'optimizer.steps': 'many'}}
    diffs['powerless'] = {'model.attention.power': 2.0}
    rows = {name: dict(diff=diff, published={}, source='me') for name, diff in diffs.items()}
    config_file = write_table(tmp_path / 'mine.py', rows)
    assert main(['rows', f'--config={config_file}', '--json']) == 1
    captured = capsys.readouterr()
    fine, misspelt, typed, powerless = json.loads(captured.out)
    assert 'refused' not in fine
    assert re.search('optimizer.stps .*configs/default.py', misspelt['refused'])
    assert re.search(r"optimizer\.steps.*'many'.*20000", typed['refused'])
    assert re.match(r'config\.model\.attention\.power .*2\.0 .*normalizer sum', powerless['refused'])
    assert re.search(f'{config_file}:powerless .*config.model', captured.err)
    assert len(captured.err.splitlines()) == 3
    assert main(['rows', f'--config={config_file}']) == 1
    assert 'misspelt' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('lines', 'message'),
    [
        (['x = 1', "x = int('many')"], "mine.py:2: invalid literal for int() with base 10: 'many'"),
        (['def get_config(row=None):', '    return undone'], "mine.py:2: NameError: name 'undone' is not defined"),
        (['def get_config(row=None:', '    return 1'], '(mine.py, line 1)'),
        (['def get_config(row=None):', "    raise ValueError('none is left')"], 'mine.py:2: none is left'),
        (['get_config = print', "ROWS = {'a,b': dict(diff={})}"], 'mine.py: row a,b: '),
    ],
)
def test_config_file_error_names_file_and_line(capsys, tmp_path, monkeypatch, lines, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text('\n'.join(lines) + '\n')
    for file in ('mine.py', f'{tmp_path}/mine.py'):
        assert message in get_error_line(capsys, 'train', f'--config={file}', '--workdir=run')


def test_config_path_resolves_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_spec(QUICKSTART_CONFIG, [])[1]['row'] == 'softmax'
    with pytest.raises(UserError, match=r'quickstart\.py'):
        load_spec('quickstart.py:softmax', [])


@pytest.mark.slow
def test_train_then_report_writes_results(capsys, tmp_path, config):
    assert main(['train', f'--config={config}', f'--workdir={tmp_path}/run', '--tensorboard']) == 0
    captured = capsys.readouterr()
    assert re.search(r'\b8 steps in \d+ s$', captured.out, re.MULTILINE)
    assert re.search(r'^ *valid loss +\d+\.\d{3} nats ', captured.out, re.MULTILINE)
    assert 'valid loss' not in captured.err
    assert main(['report', f'{tmp_path}/run', '--json', f'--out={tmp_path}/out']) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row['step'] == 8
    assert (tmp_path / 'out' / 'report.html').exists()
    events = read_scalars(tmp_path / 'run' / 'tensorboard')
    records = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    np.testing.assert_allclose(events['train/loss'], [line['train/loss'] for line in records[1:]], rtol=1e-6)


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {name: [event.value for event in accumulator.Scalars(name)] for name in accumulator.Tags()['scalars']}


@pytest.mark.slow
def test_divergence_exits_with_3_in_one_line(capsys, tmp_path, config):
    overrides = ['--config.optimizer.peak_learning_rate=1e30', '--config.checkpoint.every_steps=1']
    assert main(['train', f'--config={config}', f'--workdir={tmp_path}/run', *overrides]) == 3
    assert 'diverged' in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize('arguments', [['report', '/nowhere'], ['report', 'configs']])
def test_report_refuses_folder_without_run(capsys, arguments):
    assert arguments[1] in get_error_line(capsys, *arguments)


@pytest.mark.parametrize('arguments', [['train', '--workdir=w'], ['checkpoint', 'verify', 'run'], ['report', 'run']])
def test_all_unknown_flags_are_reported(capsys, arguments):
    line = get_error_line(capsys, *arguments, '--unheard-of=5', '--also_unknown')
    assert '--unheard-of=5' in line
    assert '--also_unknown' in line
    assert f'sinklab {" ".join(arguments[:-1])} --help' in line


@pytest.mark.parametrize(
    ('arguments', 'suggestion'),
    [
        (['train', '--workdir=w', '--confg=x'], '--config'),
        (['sweep', '--config=x', '--workdir=w', '--seed=3'], '--seeds'),
        (['measure', 'run', '--lenght=3'], '--length'),
        (['checkpoint', 'export', 'run', '--out=x', '--dtyp=float32'], '--dtype'),
        (['train', '--workdir=w', '--optimizer.steps=5'], '--config.optimizer.steps'),
        (['claims', '--weight_decay=5'], '--config.optimizer.weight_decay'),
        (
            ['train', '--config.model.attention.heads=2', '--config=configs/quickstart.py:k', '--workdir=w'],
            'model.heads',
        ),
    ],
)
def test_unknown_flag_error_suggests_closest_flag(capsys, tmp_path, monkeypatch, arguments, suggestion):
    monkeypatch.chdir(tmp_path)
    assert f'{suggestion}?' in get_error_line(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('name', 'pair'),
    [('softmax', ('exp', 'sum')), ('sigmoid', ('sigmoid', 'none')), ('linear', ('identity', 'none'))],
)
def test_name_of_operation_sets_similarity_and_normalizer(name, pair):
    spec, row = load_spec('configs/quickstart.py:softmax', [f'--config.model.attention={name}'], 'smoke')
    attention = spec.model.attention
    assert (attention.similarity, attention.normalizer) == pair
    assert row['overrides'] == {
        'model.attention.similarity': attention.similarity,
        'model.attention.normalizer': attention.normalizer,
    }


def test_batch_of_more_rows_than_windows_is_refused_before_training(capsys, config, tmp_path):
    arguments = [f'--config={config}', '--config.optimizer.batch_size=100000', f'--workdir={tmp_path}/run']
    assert main(['train', *arguments]) == 1
    assert 'batch_size is 100000' in capsys.readouterr().err.splitlines()[-1]


def test_all_invalid_overrides_are_listed_in_one_line(capsys, tmp_path):
    flags = [f'--config={QUICKSTART_CONFIG}', '--size=smoke', f'--workdir={tmp_path}/run']
    conflicts = ['--config.optimizer.warmup_steps=30', '--config.optimizer.steps=20', '--config.probe.length=99']
    line = get_error_line(capsys, 'train', *flags, *conflicts)
    assert [text for text in ('2 faults', 'warmup_steps is 30', 'probe.length is 99') if text not in line] == []
    invalid = ['--config.optimizer.stps=3', '--config.model.layers=many', '--config.data.lenght=3']
    line = get_error_line(capsys, 'train', *flags, *invalid)
    assert [text for text in ('3 faults', 'stps', "layers is 'many'", 'lenght') if text not in line] == []


@pytest.mark.parametrize(('arguments', 'word'), [([], 'VERB'), (['rpeort', 'runs'], 'report')])
def test_missing_or_unknown_command_is_refused(capsys, arguments, word):
    assert word in get_error_line(capsys, *arguments)


@pytest.mark.parametrize('command', COMMANDS)
def test_command_summary_is_that_of_its_module_and_does_not_repeat_its_name(command):
    assert import_command(command).__doc__.splitlines()[0] == COMMANDS[command]
    assert not COMMANDS[command].startswith(command)


def test_help_and_options_of_all_commands_do_not_import_jax():
    code = 'import sys, sinklab.cli.main as m\ntry: m.main(["--help"])\nexcept SystemExit: pass\n'
    code += 'assert not {"jax", "flax", "grain", "numpy"} & set(sys.modules), sys.modules.keys()\nm.build_parser()\n'
    code += 'assert not {"jax", "flax", "grain", "orbax"} & set(sys.modules), sys.modules.keys()'
    subprocess.run([sys.executable, '-c', code], check=True, capture_output=True)


def iterate_parsers(parser):
    """Yield a parser and all its subparsers, each with its program name."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from iterate_parsers(subparser)


SUBPARSERS = dict(iterate_parsers(build_parser()))


@pytest.mark.parametrize('prog', SUBPARSERS)
def test_every_option_has_help_and_every_command_has_example(prog):
    parser = SUBPARSERS[prog]
    assert all(action.help for action in parser._actions if not isinstance(action, argparse._SubParsersAction))
    assert f'example:\n  {prog.split()[0]}' in parser.epilog


@pytest.mark.parametrize(
    ('options', 'prompt'),
    [
        (['--prompt', '-- SQL comment'], '-- SQL comment'),
        (['--prompt', '--length=1 and more'], '--length=1 and more'),
        (['--prompt', '--unheard-of=5 or 6'], '--unheard-of=5 or 6'),
        (['--prompt=--unheard-of'], '--unheard-of'),
        (['--prompt=-x'], '-x'),
        (['--prompt', '-5'], '-5'),
    ],
)
def test_unknown_flag_check_accepts_values_that_begin_with_dashes(options, prompt):
    arguments = ['sample', 'run', *options]
    assert build_parser().parse_known_args(arguments)[0].prompt == prompt


@pytest.mark.parametrize('arguments', [['measure', 'run', '--config.seed=3'], ['checkpoint', 'verify', 'run', 'now']])
def test_commands_without_overrides_refuse_them(capsys, arguments):
    assert arguments[-1] in get_error_line(capsys, *arguments)
