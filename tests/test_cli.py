"""The program as a person meets it: one clear line, and the right exit code."""

import argparse
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from sinklab.cli.config_flags import load_spec
from sinklab.cli.main import COMMANDS, build_parser, main
from sinklab.run_dir import RunDir
from sinklab.schema import UserError

QUICK = 'configs/quickstart.py:softmax'


def refused(capsys, *arguments):
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ''
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    return lines[0]


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--config.optimizer.stps=5'], 'config.optimizer.stps is unknown; did you mean steps?'),
        (['--config.optimzer.steps=5'], 'config.optimzer is unknown; did you mean config.optimizer.steps?'),
        (['--config.optimizer=5'], 'config.optimizer holds fields (batch_size, beta1'),
        (['--config.seed.x=5'], 'config.seed holds a value'),
        (['--config.optimizer.steps=many'], 'config.optimizer.steps=many is no int; its value here is'),
        (['--config.optimizer.steps=1.5'], 'is no int'),
        (['--config.optimizer.steps=100k'], 'is no int'),
        (['--config.optimizer.steps=['], 'is no int'),
        (['--config.optimizer.steps=-5'], 'it must be a whole number of at least 1'),
        ([f'--config.optimizer.steps={10**20}'], 'it must be a whole number of at least 1, below 2^31'),
        ([f'--config.model.vocabulary={(1 << 20) + 1}'], 'and at most 1048576'),
        (['--config.model.attention.similarity=softmax'], 'allowed: exp, softpick'),
        (['--config.model.attention.normalizer=none'], 'exp goes with: sum'),
        (['--config.data.length=8'], 'config.probe.length is 64, longer than a window'),
        (['--config.data.source=text:/nowhere/*.txt'], 'matches no file'),
        (['--config.data.source=web:x'], 'sources: stdlib, text:GLOB'),
        (['--data=3'], 'cannot be divided over 3 devices'),
        (['--config.optimizer.batch_size=1000000000'], 'holds at least 45776.4 GiB on a device'),
        (['--attention=tpu'], 'it is for tpu, and the devices here are cpu; here are auto, dense, chunked'),
        (['--attention=flash'], '--attention=flash is unknown; it is one of auto, dense, chunked, tpu, gpu, cudnn'),
        (['--data=0'], '--data=0 must be a whole number of at least 1'),
        (['--micro_batch=5'], '--micro_batch=5 does not divide'),
        (['--tensor=8'], '--tensor=8 wants 8 devices and 4 are here'),
        (['--data=8'], 'wants 8 devices and 4 are here'),
        (['--steps=5'], '--steps=5 is unknown; did you mean --config.optimizer.steps?'),
        (['--config.seed'], '--config.seed is unknown'),
    ],
)
def test_a_wrong_input_is_one_line_and_leaves_nothing(capsys, tmp_path, arguments, words):
    line = refused(capsys, 'train', f'--config={QUICK}', f'--workdir={tmp_path}/run', *arguments)
    assert words in line
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        ('configs/quickstart.py', 'no row was named (rows: softmax, sigmoid'),
        ('configs/quickstart.py:sigmod', "no row 'sigmod'; did you mean sigmoid?"),
        ('configs/default.py:x', 'has no rows'),
        (
            'configs/quickstat.py:softmax',
            'is no config file; there are configs/',
        ),
        ('README.md', 'is no config file'),
        ('configs/table.py:x', 'has no get_config(row)'),
    ],
)
def test_a_config_that_is_not_there_is_named(capsys, tmp_path, given, words):
    assert words in refused(capsys, 'train', f'--config={given}', f'--workdir={tmp_path}/run')


def test_overrides_keep_the_type_that_a_field_has():
    spec, row = load_spec(
        QUICK,
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


def test_a_size_changes_the_run_and_not_what_its_row_is_about():
    (plain, usual), (small, smoke) = load_spec(QUICK, []), load_spec(QUICK, ['--config.optimizer.steps=5'], 'smoke')
    assert (small.model.layers, small.optimizer.steps) == (2, 5)
    assert small.model.attention == plain.model.attention
    assert {name for name in usual if usual[name] != smoke[name]} == {'size', 'overrides'}


def test_a_config_without_sizes_is_trained_where_none_is_asked_for(capsys, tmp_path, config):
    assert load_spec(config, [])[1]['size'] is None
    line = refused(capsys, 'train', f'--config={config}', '--size=smoke', f'--workdir={tmp_path}/run')
    assert f'--size=smoke: get_config of --config={config} takes no size; leave --size out' in line
    line = refused(capsys, 'train', f'--config={QUICK}', '--size=smoek', f'--workdir={tmp_path}/run')
    assert "there is no size 'smoek'; did you mean smoke? (sizes: paper, quickstart, smoke" in line


@pytest.mark.slow
def test_rows_are_listed_with_what_was_published(capsys):
    assert main(['rows', '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        assert set(row) - {'note'} == {'config', 'row', 'diff', 'published', 'source', 'size', 'equals_baseline'}
    assert main(['rows', '--config=configs/quickstart.py', '--json']) == 0
    table = json.loads(capsys.readouterr().out)
    assert table == [row for row in rows if row['config'] == 'configs/quickstart.py']
    softmax, _, sigmoid = table[:3]
    assert (softmax['row'], softmax['published']) == ('softmax', {'sink/1': 18.18, 'valid/loss': 3.73})
    assert sigmoid['diff'] == {'model.attention.similarity': 'sigmoid', 'model.attention.normalizer': 'none'}


@pytest.mark.slow
def test_rows_are_read_at_100_columns(capsys):
    assert main(['rows']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any('softmax' in line and 'Sink_1 18.18  loss 3.73' in line for line in lines)


def test_rows_of_a_file_of_ones_own_and_of_a_file_without(capsys, tmp_path, config):
    mine = tmp_path / 'table.py'
    row = "dict(diff={'seed': 1}, published={'fails': True}, source='me', note='not so sure [1]')"
    mine.write_text(f"from configs.table import table\nROWS = {{'one': {row}}}\nget_config = table(ROWS)\n")
    assert main(['rows', f'--config={mine}']) == 0
    printed = capsys.readouterr().out
    assert 'one  seed=1   fails      me ' in printed
    assert 'not so sure [1]' in printed
    assert 'has no rows; sinklab rows lists' in refused(capsys, 'rows', f'--config={config}')
    assert 'is no config file; there are' in refused(capsys, 'rows', '--config=nowhere.py')
    assert '--row=x is unknown' in refused(capsys, 'rows', '--row=x')


@pytest.mark.parametrize('value', ['nan', '-inf'])
def test_a_published_number_that_is_not_finite_is_refused_before_anything_is_written(capsys, tmp_path, value):
    mine = tmp_path / 'table.py'
    row = f"dict(diff={{}}, published={{'sink/1': float({value!r})}}, source='me')"
    mine.write_text(f"from configs.table import table\nROWS = {{'one': {row}}}\nget_config = table(ROWS)\n")
    for verb in (['rows'], ['sweep', f'--workdir={tmp_path}/runs']):
        assert 'sink/1' in refused(capsys, *verb, f'--config={mine}')
    assert 'sink/1' in refused(capsys, 'train', f'--config={mine}:one', f'--workdir={tmp_path}/run')
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != '__pycache__'] == []


def test_a_row_that_does_not_parse_is_shown_as_refused(capsys, tmp_path):
    diffs = {'fine': {}, 'misspelt': {'optimizer.stps': 5}, 'powerless': {'model.attention.power': 2.0}}
    rows = {name: dict(diff=diff, published={}, source='me') for name, diff in diffs.items()}
    mine = tmp_path / 'mine.py'
    mine.write_text(f'from configs.table import table\nROWS = {rows!r}\nget_config = table(ROWS)\n')
    assert main(['rows', f'--config={mine}', '--json']) == 1
    printed = capsys.readouterr()
    fine, misspelt, powerless = json.loads(printed.out)
    assert 'refused' not in fine
    assert 'optimizer.stps is no field of configs/default.py' in misspelt['refused']
    assert powerless['refused'].startswith('config.model.attention.power is 2.0 with normalizer sum')
    assert f'sinklab rows: {mine}:powerless is refused: config.model' in printed.err
    assert len(printed.err.splitlines()) == 2
    assert main(['rows', f'--config={mine}']) == 1
    assert 'misspelt is refused' in capsys.readouterr().err
    mine.write_text('ROWS = dict(one=5)\ndef get_config(row):\n    return None\n')
    assert 'row one is 5; it must be dict(diff=' in refused(capsys, 'rows', f'--config={mine}')


@pytest.mark.parametrize(
    ('lines', 'words'),
    [
        (
            ['x = 1', "x = int('many')"],
            "does not run: invalid literal for int() with base 10: 'many' (mine.py, line 2)",
        ),
        (
            ['def get_config(row=None):', '    return undone'],
            "NameError: name 'undone' is not defined (mine.py, line 2)",
        ),
        (['def get_config(row=None:', '    return 1'], '(mine.py, line 1)'),
        (['def get_config(row=None):', "    raise ValueError('none is left')"], 'none is left\n'),
    ],
)
def test_a_config_file_that_raises_is_told_by_its_line(capsys, tmp_path, monkeypatch, lines, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text('\n'.join(lines) + '\n')
    for file in ('mine.py', f'{tmp_path}/mine.py'):
        assert words in refused(capsys, 'train', f'--config={file}', '--workdir=run') + '\n'


def test_a_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_spec(QUICK, [])[1]['row'] == 'softmax'
    with pytest.raises(UserError, match='is no config file'):
        load_spec('quickstart.py:softmax', [])


@pytest.mark.slow
def test_train_then_report(capsys, tmp_path, config):
    assert main(['train', f'--config={config}', f'--workdir={tmp_path}/run', '--tensorboard']) == 0
    said = capsys.readouterr()
    assert re.search(r'^.*: done, 8 steps in \d+ s$', said.out, re.MULTILINE)
    assert re.search(r'^ *valid loss +\d+\.\d{3} nats ', said.out, re.MULTILINE)
    assert 'valid loss' not in said.err
    assert main(['report', f'{tmp_path}/run', '--json', f'--out={tmp_path}/out']) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row['step'] == 8
    assert (tmp_path / 'out' / 'report.html').exists()
    events = scalars(tmp_path / 'run' / 'tensorboard')
    written = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    np.testing.assert_allclose(events['train/loss'], [line['train/loss'] for line in written[1:]], rtol=1e-6)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()['scalars']}


@pytest.mark.slow
def test_divergence_exits_with_3_and_names_the_checkpoint(capsys, tmp_path, config):
    wild = ['--config.optimizer.peak_learning_rate=1e30', '--config.checkpoint.every_steps=1']
    assert main(['train', f'--config={config}', f'--workdir={tmp_path}/run', *wild]) == 3
    assert f'the last good checkpoint is {tmp_path}/run/checkpoints/' in capsys.readouterr().err


@pytest.mark.parametrize('arguments', [['report', '/nowhere'], ['report', 'configs']])
def test_a_report_of_no_run_is_refused(capsys, arguments):
    assert 'contains no run' in refused(capsys, *arguments)


@pytest.mark.slow
def test_doctor_says_what_works_and_fails_with_the_reason(capsys, monkeypatch):
    assert main(['doctor', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found['checks'].values()) == {'ok'}
    assert found['versions']['jax']
    monkeypatch.setenv('SINKLAB_CACHE', '/proc/nowhere')
    assert main(['doctor']) == 1
    assert 'token cache does not work here: ' in capsys.readouterr().err


@pytest.mark.parametrize('verb', COMMANDS)
def test_an_unknown_option_is_refused_before_a_missing_one_is_asked_for(capsys, verb):
    action = ['verify'] if verb == 'checkpoint' else []
    line = refused(capsys, verb, *action, '--unheard-of=5', '--also_unknown')
    assert '--unheard-of=5 is unknown' in line
    assert '--also_unknown is unknown' in line
    assert f'see sinklab {" ".join([verb, *action])} --help' in line
    assert 'required' not in line


@pytest.mark.parametrize(
    ('arguments', 'meant'),
    [
        (['train', '--confg=x'], '--config'),
        (['sweep', '--seed=3', '--workdr=x'], '--workdir'),
        (['measure', '--lenght=3'], '--length'),
        (['checkpoint', 'export', '--dtyp=float32'], '--dtype'),
        (['train', '--optimizer.steps=5'], '--config.optimizer.steps'),
        (['compile', '--weight_decay=5'], '--config.optimizer.weight_decay'),
        (
            ['train', '--config.model.attention.heads=2', '--config=configs/quickstart.py:k', '--workdir=w'],
            'model.heads',
        ),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_is_meant(capsys, tmp_path, monkeypatch, arguments, meant):
    monkeypatch.chdir(tmp_path)
    assert f'did you mean {meant}?' in refused(capsys, *arguments).replace('mean config.', 'mean ')
    assert list(tmp_path.iterdir()) == []


def test_help_and_what_follows_two_dashes_are_no_unknown_options(capsys):
    with pytest.raises(SystemExit) as exit:
        main(['train', '--confg=x', '--help'])
    assert exit.value.code == 0
    assert 'is unknown' not in capsys.readouterr().err


def test_every_fault_of_a_config_is_named_at_once(capsys, tmp_path):
    wrong = {
        'optimizer.warmup_steps': 30,
        'optimizer.steps': 20,
        'probe.length': 99,
        'model.rotary.scaling': 'llama3',
    }
    given = [f'--config.{path}={value}' for path, value in wrong.items()]
    line = refused(capsys, 'train', f'--config={QUICK}', '--size=smoke', f'--workdir={tmp_path}/run', *given)
    named = ('optimizer.warmup_steps is 30', 'probe.length is 99', *(f'rotary.{one}' for one in ('slow', 'fast')))
    assert [words for words in named if words not in line] == []
    assert '(5) ' in line
    several = ['--config.optimizer.stps=3', '--config.model.layers=many', '--config.data.lenght=3']
    line = refused(capsys, 'train', f'--config={QUICK}', f'--workdir={tmp_path}/run', *several)
    assert [words for words in ('optimizer.stps', 'model.layers=many', 'data.lenght') if words not in line] == []
    assert not (tmp_path / 'run').exists()


def test_no_verb_and_a_wrong_verb_print_the_usage(capsys):
    for arguments in ([], ['tran']):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 1
        assert 'sinklab' in capsys.readouterr().err


@pytest.mark.parametrize('verb', COMMANDS)
def test_every_verb_explains_itself_with_an_example(capsys, verb):
    with pytest.raises(SystemExit) as exit:
        main([verb, '--help'])
    assert exit.value.code == 0
    assert f'example:\n  sinklab {verb}' in capsys.readouterr().out


@pytest.mark.parametrize('verb', COMMANDS)
def test_the_list_of_verbs_says_no_verb_twice(verb):
    summary = COMMANDS[verb].__doc__.splitlines()[0]
    assert not summary.startswith(verb)


def test_a_folder_that_is_suggested_can_be_given_to_a_shell(capsys, tmp_path):
    folder = tmp_path / 'my runs'
    folder.mkdir()
    (folder / 'letter').write_text('dear')
    line = refused(capsys, 'train', f'--config={QUICK}', f'--workdir={folder}')
    assert shlex.split(line.partition('e.g. ')[2]) == [f'--workdir={folder}/run']
    (folder / 'letter').rename(folder / 'row.json')
    RunDir(folder).write_json('config', {'seed': 5})
    line = refused(capsys, 'train', f'--config={QUICK}', f'--workdir={folder}')
    assert shlex.split(line.partition('e.g. ')[2]) == [f'--workdir={folder}-2']


def test_help_needs_no_accelerator_library():
    code = 'import sys, sinklab.cli.main as m\ntry: m.main(["--help"])\nexcept SystemExit: pass\n'
    code += 'assert not {"jax", "flax", "grain", "numpy"} & set(sys.modules), sys.modules.keys()'
    subprocess.run([sys.executable, '-c', code], check=True, capture_output=True)


def actions(parser):
    """All parsers below a parser, by the words that name them, and itself."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions(below)


SUBPARSERS = dict(actions(build_parser()))


@pytest.mark.parametrize('prog', SUBPARSERS)
def test_every_option_has_a_help_text_and_every_command_an_example(prog):
    verb = SUBPARSERS[prog]
    assert all(action.help for action in verb._actions if not isinstance(action, argparse._SubParsersAction))
    assert f'example:\n  {prog.split()[0]}' in verb.epilog


@pytest.mark.parametrize(
    ('words', 'prompt'),
    [
        (['--prompt', '-- SQL comment'], '-- SQL comment'),
        (['--prompt', '--length=1 and more'], '--length=1 and more'),
        (['--prompt', '--unheard-of=5 or 6'], '--unheard-of=5 or 6'),
        (['--prompt=--unheard-of'], '--unheard-of'),
        (['--prompt=-x'], '-x'),
        (['--prompt', '-5'], '-5'),
    ],
)
def test_a_value_that_begins_with_dashes_is_read_as_argparse_reads_it(words, prompt):
    given = ['sample', 'run', *words]
    top = build_parser()
    top.check_unknown_options(given)
    assert top.parse_known_args(given)[0].prompt == prompt
    with pytest.raises(UserError, match='--prmpt'):
        top.check_unknown_options([*given, '--prmpt=two words'])
