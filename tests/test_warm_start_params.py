"""Forks from parameters alone: runs from step 0 with a new optimizer state, schedule and data."""

import json
import shutil

import numpy as np
import pytest
from stores import make_store, write_chat
from tiny_runs import (
    CrashError,
    CrashingCallback,
    assert_same_trees,
    drop_clock_metrics,
    load_parameters,
    restore_state,
)
from tiny_specs import make_case_params, make_tiny_spec

from sinklab.checkpoint.checkpointer import restore_parameters as restore_nested_parameters
from sinklab.cli.config_flags import load_run_config, load_spec
from sinklab.cli.main import main
from sinklab.config.spec import Layout
from sinklab.config.validate import parse_config
from sinklab.configs import default, fine_tuning
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train import loop, state, step, warm_start
from sinklab.train.optimizer import make_schedule

pytestmark = pytest.mark.usefixtures('no_disk_delay')
SGD = dict(optimizer__name='sgd', optimizer__beta2=None, optimizer__epsilon=None)


def train(spec, path, parent_checkpoint, *callbacks, row='tuned'):
    loop.train(spec, Layout(), RunDir(path), dict(row=row), *callbacks, parent=parent_checkpoint)
    return RunDir(path).read_records()


def make_imported_run(path, **row_changes):
    """Return the run folder of an imported Hugging Face model, without parameters."""
    config = default.get_config()
    config.update_from_flattened_dict(fine_tuning.IMPORTED_MODEL_OPTIMIZER)
    folder, row_values = (
        RunDir(path),
        dict(config='hf:theirs', row='theirs', size=None, overrides={}, diff={}, published={}),
    )
    folder.initialize(parse_config(config.to_dict()), row_values | dict(source='hf:theirs') | row_changes)
    return folder


def test_imported_model_uses_fine_tuning_defaults(tmp_path):
    folder = make_imported_run(tmp_path / 'theirs', optimizer_defaults='configs/fine_tuning.py')
    spec, _ = load_run_config(folder, 'ours', ['--config.optimizer.steps=20', '--config.data.length=32'])
    optimizer = spec.optimizer
    assert (optimizer.peak_learning_rate, optimizer.weight_decay, optimizer.beta2) == (2e-5, 0.0, 0.999)
    assert (optimizer.schedule, optimizer.final_share) == ('cosine', 0.0)
    assert (optimizer.steps, optimizer.warmup_steps, spec.probe.length) == (20, 2, 32)


def test_overrides_take_precedence_over_fine_tuning_defaults(tmp_path):
    folder = make_imported_run(tmp_path / 'theirs', optimizer_defaults='configs/fine_tuning.py')
    overrides = {
        'optimizer.warmup_steps': 7,
        'optimizer.steps': 20,
        'optimizer.schedule': 'constant',
        'probe.length': 9,
    }
    spec, _ = load_run_config(folder, 'ours', [f'--config.{path}={value}' for path, value in overrides.items()])
    assert (spec.optimizer.warmup_steps, spec.optimizer.final_share, spec.probe.length) == (7, None, 9)
    with pytest.raises(UserError) as exc_info:
        load_run_config(
            folder,
            'ours',
            ['--config.optimizer.warmup_steps=30', '--config.optimizer.steps=20', '--config.probe.keys=65'],
        )
    assert [text for text in ('warmup_steps', '30', 'probe.keys', '65') if text not in str(exc_info.value)] == []


@pytest.mark.parametrize(
    'row_changes', [{}, {'optimizer_defaults': 'configs/fine_tuning.py', 'from': dict(run='r', step=1)}]
)
def test_fork_of_trained_run_keeps_its_optimizer_config(tmp_path, row_changes):
    """Check a model imported without such defaults, and a run fine-tuned with them."""
    folder = make_imported_run(tmp_path / 'theirs', **row_changes)
    spec, row = load_run_config(folder, 'ours', ['--config.optimizer.steps=500'])
    assert (spec.optimizer.warmup_steps, 'optimizer_defaults' in row) == (200, False)


@pytest.fixture(scope='module')
def stores(corpus, tmp_path_factory):
    """Return a folder with a text store and a chat store of the same tokenizer."""
    path = tmp_path_factory.mktemp('stores')
    chats = [[('user', f'what is {n}?' * (1 + n % 3)), ('assistant', f'it is {2 * n}, I think')] for n in range(150)]
    make_store(path / 'text', corpus)
    tokenizer = str(path / 'text' / 'tokenizer.json')
    make_store(path / 'chat', write_chat(path / 'chat.jsonl', chats), tokenizer=tokenizer, vocabulary=None)
    return path


def load_row_spec(file, row, store):
    """Return the spec of a row at smoke size that keeps all checkpoints."""
    data_config = dict(source=f'store:{store}', held_out=0.2)
    flags = [f'--config.data.{name}={value}' for name, value in data_config.items()]
    flags += ['--config.checkpoint.every_steps=1', '--config.checkpoint.keep=9']
    return load_spec(f'configs/{file}.py:{row}', flags, 'smoke')[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize('row', make_case_params(fine_tuning.ROWS, list(fine_tuning.ROWS)[-1:]))
def test_fine_tuning_row_starts_with_parameters_of_same_scale_row(row, stores, tmp_path):
    scale_spec, spec = (
        load_row_spec('scale', row, stores / 'text'),
        load_row_spec('fine_tuning', row, stores / 'chat'),
    )
    parent = RunDir(tmp_path / 'parent')
    train(scale_spec, parent.path, None, row=row)
    steps = scale_spec.optimizer.steps
    parent_checkpoint = warm_start.WarmStart(parent, steps, scale_spec, 'params')
    records = train(spec, tmp_path / 'tuned', parent_checkpoint)
    tuned_run = RunDir(tmp_path / 'tuned')
    assert [record['step'] for record in records] == tuned_run.list_checkpoint_steps() == [0, 1, 2, 3, 4]
    assert_same_trees(load_parameters(tuned_run.path, 0), load_parameters(parent.path, steps))
    first_state, initial_state = restore_state(tuned_run, spec, 0), state.init_state(spec)
    assert_same_trees(
        (first_state['step'], first_state['opt_state']), (initial_state['step'], initial_state['opt_state'])
    )
    batch = load_run_data(spec).batches.read_rows(0, range(4))
    loss = step.make_loss(spec)(
        restore_nested_parameters(parent.path, steps), batch
    ) / step.compute_predicted_fraction(batch)
    np.testing.assert_allclose(records[1]['train/loss'], loss, rtol=1e-5)
    assert make_schedule(spec.optimizer)(0) == 0
    assert_same_trees(load_parameters(tuned_run.path, 1), load_parameters(tuned_run.path, 0))
    pairs = zip(load_parameters(tuned_run.path, 2), load_parameters(tuned_run.path, 1), strict=True)
    assert all((later != earlier).any() for later, earlier in pairs)
    with pytest.raises(CrashError):
        train(spec, tmp_path / 'killed', parent_checkpoint, CrashingCallback(3))
    shutil.rmtree(parent.path)
    assert drop_clock_metrics(train(spec, tmp_path / 'killed', None)) == drop_clock_metrics(records)
    assert_same_trees(load_parameters(tmp_path / 'killed', 4), load_parameters(tuned_run.path, 4))


@pytest.fixture(scope='module')
def spec(corpus):
    return make_tiny_spec(data__source=corpus, checkpoint__every_steps=4)


@pytest.fixture(scope='module')
def parent(spec, tmp_path_factory):
    """Return a completed run with checkpoints 4 and 8."""
    folder = RunDir(tmp_path_factory.mktemp('runs') / 'parent')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(folder.path.parent / 'cache'))
        train(spec, folder.path, None, row='softmax')
    return folder


@pytest.fixture
def parent_checkpoint(parent, spec):
    return warm_start.WarmStart(parent, 8, spec, 'params')


def change_spec(spec, **changes):
    return make_tiny_spec(**{'data__source': spec.data.source, 'checkpoint__every_steps': 4, **changes})


@pytest.mark.slow
def test_fork_with_another_optimizer_takes_parameters_and_records_changes(spec, parent_checkpoint, tmp_path):
    other_spec = change_spec(spec, **SGD, model__learned_kv__kind='kv', data__seed=3)
    records = train(other_spec, tmp_path / 'tuned', parent_checkpoint)
    assert [record['step'] for record in records] == [*range(9)]
    assert 'valid/loss' in records[0]
    parent = RunDir(tmp_path / 'tuned').read_parent()
    assert (tmp_path / 'tuned' / parent['run']).resolve() == parent_checkpoint.run_dir.path.resolve()
    assert (parent['step'], parent['takes'], parent['start']) == (8, 'params', 0)
    assert parent['new'] == ['blocks.attention.learned_kv.key_HK', 'blocks.attention.learned_kv.value_HK']
    assert 'optimizer.name adamw -> sgd' in parent['config']
    assert parent['data'] == ['seed 0 -> 3']


@pytest.mark.exhaustive
def test_fork_accepts_changed_data_and_rejects_another_tokenizer(spec, parent_checkpoint, tmp_path):
    data_fingerprint, folder = load_run_data(spec).fingerprint, RunDir(tmp_path / 'tuned')
    assert warm_start.describe_parent(parent_checkpoint, spec, folder, dict(data_fingerprint, store='x'))['data'] == [
        f'store {data_fingerprint["store"]} -> x'
    ]
    with pytest.raises(UserError, match=r'--from=params:.*/parent@8 .*tokenizer'):
        warm_start.describe_parent(parent_checkpoint, spec, folder, dict(data_fingerprint, tokenizer='x'))


@pytest.mark.slow
def test_train_command_resumes_fork_with_and_without_from_flag(capsys, parent, tmp_path):
    arguments = ['train', '--compiled=none', f'--workdir={tmp_path}/tuned', f'--from=params:{parent}@4']
    arguments += ['--config.optimizer.peak_learning_rate=1e-3']
    tuned_run = RunDir(tmp_path / 'tuned')
    assert main(arguments) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if 'since step 0: from params:' in line)
    assert 'optimizer.peak_learning_rate 0.01 -> 0.001' in line
    records = drop_clock_metrics(tuned_run.read_records())
    for repeated_arguments in (
        arguments,
        [argument for argument in arguments if not argument.startswith('--from')]
        + [f'--config={write_config_file(tmp_path)}'],
    ):
        shutil.rmtree(tuned_run.checkpoint_dir / '8')
        assert main(repeated_arguments) == 0, capsys.readouterr().err
        assert drop_clock_metrics(tuned_run.read_records()) == records
    assert main([argument.replace('params:', '') for argument in arguments]) == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert f'--from={parent}@4' in last_line
    assert f'--from=params:{parent}@4' in last_line


def write_config_file(path):
    """Write a config file with the config of the run and return its path."""
    config = json.loads((path / 'tuned' / 'config.json').read_text())
    lines = ['from sinklab.configs import default', 'def get_config(row=None):', '    config = default.get_config()']
    lines += [f'    config.update({config!r})', '    return config']
    (path / 'mine.py').write_text('\n'.join(lines) + '\n')
    return path / 'mine.py'
