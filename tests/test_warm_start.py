"""Forks: continuation from a checkpoint of another run, copied and new parameters, and refusals."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from checkpoint_damages import flip_bit
from tiny_runs import CrashError, CrashingCallback, assert_same_trees, drop_clock_metrics, restore_state
from tiny_specs import make_tiny_spec, replace_operation

from sinklab.config.spec import Layout
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.parallel import device_mesh
from sinklab.report import page, runs
from sinklab.run_dir import RunDir
from sinklab.train import loop, state, warm_start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('no_disk_delay')]
KV_COLUMNS = dict(model__learned_kv__kind='kv')


@pytest.fixture(scope='module')
def spec(corpus):
    return make_tiny_spec(data__source=corpus, checkpoint__every_steps=4)


@pytest.fixture(scope='module')
def parent(spec, tmp_path_factory):
    """Return a run with checkpoints at steps 4 and 8; 8 is its last step."""
    folder = RunDir(tmp_path_factory.mktemp('runs') / 'parent')
    loop.train(spec, Layout(), folder, dict(row='softmax'))
    return folder


@pytest.fixture
def parent_checkpoint(parent, spec):
    return warm_start.WarmStart(parent, 4, spec)


def change_spec(spec, **changes):
    return make_tiny_spec(**{'data__source': spec.data.source, 'checkpoint__every_steps': 4, **changes})


def train(spec, path, parent_checkpoint, *callbacks, row='fork'):
    loop.train(spec, Layout(), RunDir(path), dict(row=row), *callbacks, parent=parent_checkpoint)
    return RunDir(path).read_records()


def test_unchanged_fork_continues_parent_bitwise(parent, spec, parent_checkpoint, tmp_path):
    records = train(spec, tmp_path / 'fork', parent_checkpoint)
    expected = drop_clock_metrics(parent.read_records(), after=4)
    assert drop_clock_metrics(records, after=4) == expected
    assert [record['step'] for record in records] == [4, 5, 6, 7, 8]
    assert 'valid/loss' in records[0], 'what it comes with is measured, as a fresh run is'
    assert_same_trees(restore_state(RunDir(tmp_path / 'fork'), spec, 8), restore_state(parent, spec, 8))


def test_fork_with_checkpoint_does_not_need_parent(parent, spec, parent_checkpoint, tmp_path):
    shutil.copytree(parent.path, tmp_path / 'parent')
    parent_checkpoint = dataclasses.replace(parent_checkpoint, run_dir=RunDir(tmp_path / 'parent'))
    with pytest.raises(CrashError):
        train(spec, tmp_path / 'fork', parent_checkpoint, CrashingCallback(6))
    shutil.rmtree(tmp_path / 'parent')
    assert drop_clock_metrics(train(spec, tmp_path / 'fork', None), after=4) == drop_clock_metrics(
        parent.read_records(), after=4
    )
    shutil.rmtree(tmp_path / 'fork' / 'checkpoints')
    with pytest.raises(UserError, match=r'\.\./parent@4.*--from'):
        train(spec, tmp_path / 'fork', None)


def test_fork_copies_parameters_by_name_and_initializes_new_ones(parent, spec, parent_checkpoint):
    other_spec, mesh = change_spec(spec, **KV_COLUMNS, seed=5), device_mesh.make_mesh(Layout())
    with jax.set_mesh(mesh):
        fork_leaves, new_leaves = (
            state.flatten_by_name(train_state)
            for train_state in (
                warm_start.load_parent_state(parent_checkpoint, other_spec, mesh),
                state.create_state(other_spec, mesh),
            )
        )
    parent_leaves = state.flatten_by_name(restore_state(parent, spec, 4))
    assert parent_leaves.keys() < fork_leaves.keys() == new_leaves.keys()
    for name, leaf in fork_leaves.items():
        np.testing.assert_array_equal(leaf, parent_leaves[name] if name in parent_leaves else new_leaves[name])
    new_names = fork_leaves.keys() - parent_leaves.keys()
    assert {name for name in new_names if np.any(fork_leaves[name])} == {
        name for name in new_names if 'params' in name
    }


def test_fork_initializes_no_leaf_that_it_takes(spec, parent_checkpoint, monkeypatch):
    mesh = device_mesh.make_mesh(Layout())
    with jax.set_mesh(mesh):
        state.make_abstract_state(spec, mesh)  # its trace of `init_state` is cached
        monkeypatch.setattr(state, 'init_state', lambda spec: pytest.fail('a state was initialized'))
        assert warm_start.load_parent_state(parent_checkpoint, spec, mesh)['step'] == 4


def test_describe_lineage_lists_new_dropped_and_changed_fields(spec, parent_checkpoint, tmp_path):
    other_spec, folder = (
        change_spec(spec, **KV_COLUMNS, model__norm='post', optimizer__weight_decay=0.3),
        RunDir(tmp_path / 'fork'),
    )
    parent = warm_start.describe_parent(parent_checkpoint, other_spec, folder, load_run_data(other_spec).fingerprint)
    assert parent['new'] == [
        *('blocks.attention.learned_kv.key_HK', 'blocks.attention.learned_kv.value_HK'),
        *('blocks.attention_norms.joined.gain_D', 'blocks.ffn_norms.joined.gain_D'),
    ]
    dropped_norms = ['blocks.attention_norms.before.gain_D', 'blocks.ffn_norms.before.gain_D', 'norm.gain_D']
    assert parent['dropped'] == dropped_norms
    assert 'optimizer.weight_decay 0.1 -> 0.3' in parent['config']
    assert (folder.path / parent['run']).resolve() == parent_checkpoint.run_dir.path.resolve()
    assert (parent['row'], parent['step'], parent['data']) == ('softmax', 4, [])


@pytest.mark.parametrize(
    ('changes', 'pattern'),
    [
        (
            dict(model__width=32),
            r'\w+ has the shape \(2, 16.*\) in --from=.*@4 and \(2, 32.*\) here \(model.width 16 -> 32',
        ),
        (dict(model__layers=3), r'has the shape \(2, .*model\.layers 2 -> 3'),
        (dict(model__vocabulary=310), r'\(300, 16\) in .* and \(310, 16\) here'),
        (dict(optimizer__name='sgd', optimizer__beta2=None, optimizer__epsilon=None), 'optimizer.name is adamw in'),
        (dict(optimizer__steps=4), 'leaves no step to train with config.optimizer.steps=4'),
    ],
)
def test_fork_refuses_incompatible_changes_before_reading_data(
    spec, parent_checkpoint, tmp_path, monkeypatch, changes, pattern
):
    monkeypatch.setattr(loop, 'load_run_data', lambda spec: pytest.fail('data was read'))
    with pytest.raises(UserError, match=pattern):
        train(change_spec(spec, **changes), tmp_path / 'fork', parent_checkpoint)
    assert not (tmp_path / 'fork').exists()


def test_describe_lineage_refuses_changed_data_and_tokenizer(spec, parent_checkpoint, tmp_path):
    data_fingerprint = load_run_data(spec).fingerprint
    for data, message_pattern in (
        (dict(data_fingerprint, store='x'), 'on other data .*restore that data'),
        (dict(data_fingerprint, tokenizer='x'), 'ids'),
    ):
        with pytest.raises(UserError, match=message_pattern):
            warm_start.describe_parent(
                parent_checkpoint, change_spec(spec, optimizer__steps=9), RunDir(tmp_path / 'fork'), data
            )


def test_report_names_fork_of_fork_by_parent(parent, spec, parent_checkpoint, tmp_path):
    sigmoid_spec = replace_operation(spec, 'sigmoid', 'none')
    sigmoid_run = RunDir(tmp_path / 'there')
    train(sigmoid_spec, sigmoid_run.path, parent_checkpoint, row='sigmoid')
    longer_optimizer = dataclasses.replace(spec.optimizer, steps=10)
    longer_spec = dataclasses.replace(spec, optimizer=longer_optimizer)
    train(longer_spec, tmp_path / 'back', warm_start.WarmStart(sigmoid_run, 8, sigmoid_spec), row='softmax')
    report_runs = runs.read_runs([str(parent), str(sigmoid_run), str(tmp_path / 'back')])
    assert [run.name for run in report_runs] == ['softmax', 'sigmoid from softmax@4', 'softmax from sigmoid@8']
    page.write_report_page(tmp_path / 'report.html', report_runs)
    html = (tmp_path / 'report.html').read_text(encoding='utf-8')
    assert 'model.attention.similarity exp -&gt; sigmoid' in html
    assert json.loads((tmp_path / 'back' / 'row.json').read_text())['from']['run'] == '../there'


def test_fork_refuses_damaged_parent_checkpoint(parent, spec, parent_checkpoint, tmp_path):
    shutil.copytree(parent.path, tmp_path / 'parent')
    shutil.rmtree(tmp_path / 'parent' / 'checkpoints' / '4' / 'state')
    damaged_parent = dataclasses.replace(parent_checkpoint, run_dir=RunDir(tmp_path / 'parent'))
    with pytest.raises(UserError, match=r'checkpoints/4 '):
        train(spec, tmp_path / 'fork', damaged_parent)
    assert not (tmp_path / 'fork').exists()


def make_interrupted_fork(spec, parent_checkpoint, path):
    """Make a fork that was killed while it saved its first checkpoint."""
    with pytest.raises(CrashError):
        train(spec, path, parent_checkpoint, CrashingCallback(5))
    (path / 'metrics.jsonl').unlink()
    (path / 'checkpoints' / '4' / 'digests_0.json').unlink()
    return path


def test_fork_with_interrupted_first_checkpoint_copies_parent_again(parent, spec, parent_checkpoint, tmp_path):
    path = make_interrupted_fork(spec, parent_checkpoint, tmp_path / 'fork')
    shutil.copytree(path, tmp_path / 'alone')
    records = train(spec, path, parent_checkpoint)
    assert [record['step'] for record in records] == [4, 5, 6, 7, 8]
    assert drop_clock_metrics(records, after=4) == drop_clock_metrics(parent.read_records(), after=4)
    with pytest.raises(UserError, match=r'/parent@4.*--from'):
        train(spec, tmp_path / 'alone', None)


def test_fork_refuses_parent_damaged_since_start(parent, spec, parent_checkpoint, tmp_path):
    path = make_interrupted_fork(spec, parent_checkpoint, tmp_path / 'fork')
    shutil.copytree(parent.path, tmp_path / 'parent')
    damaged_parent = dataclasses.replace(parent_checkpoint, run_dir=RunDir(tmp_path / 'parent'))
    flip_bit(damaged_parent.run_dir, 4, np.random.default_rng(0))
    with pytest.raises(UserError, match=r'checkpoints/4 .*damaged'):
        train(spec, path, damaged_parent)
    assert RunDir(path).list_checkpoint_steps() == []
