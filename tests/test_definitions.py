"""Interpretations of the papers in docs/paper/decisions.md, each compared with its alternative."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from rows import PAPER_MODULES, ROWS, get_name

from docs.reference import REASONS_NOT_COMPARED
from sinklab.config.validate import parse_config
from sinklab.configs import packing
from sinklab.data.run_data import load_run_data
from sinklab.metrics import registry
from sinklab.model.transformer import Transformer
from sinklab.report import sweep_table
from sinklab.run_dir import RunDir


def make_spec(module, row, size='paper'):
    return parse_config(module.get_config(row, size).to_dict())


def replace_unit_p_norm(spec):
    """Return the spec with a p_norm of power 1 replaced by the equal normalizer sum."""
    attention = spec.model.attention
    if attention.normalizer != 'p_norm' or attention.power != 1:
        return spec
    sum_attention = dataclasses.replace(attention, normalizer='sum', power=None)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, attention=sum_attention))


@pytest.mark.slow
def test_equal_specs_publish_equal_numbers():
    published_by_spec = {}
    for module, row in ROWS:
        published = module.ROWS[row]['published']
        assert published_by_spec.setdefault(replace_unit_p_norm(make_spec(module, row)), published) == published, (
            f'{get_name(module)}:{row}'
        )


def test_published_numbers_of_added_heads_belong_to_one_row():
    """Check that one of two interpretations of added heads has the numbers of the published row."""
    numbers = [
        row_info['published']
        for module in PAPER_MODULES
        for row, row_info in module.ROWS.items()
        if row.startswith('add')
    ]
    assert sorted(map(bool, numbers)) == [False, True]


def test_packing_trains_120m_parameters_on_30b_tokens():
    spec = make_spec(packing, 'causal')
    shapes = nnx.state(nnx.eval_shape(lambda: Transformer(spec.model, spec.data.length, nnx.Rngs(0))))
    num_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    num_embedding_parameters = spec.model.vocabulary * spec.model.width
    assert num_parameters - num_embedding_parameters == pytest.approx(120e6, rel=0.05)
    num_tokens = spec.optimizer.steps * spec.optimizer.batch_size * spec.data.length
    assert num_tokens == pytest.approx(30e9, rel=1e-3)


@pytest.mark.parametrize('row', ['causal_fixed', 'document_fixed'])
def test_fixed_bos_is_at_first_position_and_before_every_document(row, corpus):
    spec = make_spec(packing, row, 'smoke')
    data = load_run_data(dataclasses.replace(spec, data=dataclasses.replace(spec.data, source=corpus, length=16)))
    ids_BT = np.concatenate([data.batches.read_rows(step, range(4)) for step in range(60)])
    is_document_start = np.roll(ids_BT == spec.data.end_token, 1, axis=1)[:, 1:]
    assert is_document_start.any(), 'no document begins within a window'
    assert (ids_BT[:, 0] == 1).all()
    assert (ids_BT[:, 1:][is_document_start] == 1).all()


@pytest.mark.parametrize(
    ('loss', 'vocabulary', 'fails'),
    [
        (5.45, 50432, False),  # relative positions, the highest published loss
        (7.3, 50432, True),  # about the loss of a unigram model
        (2.93, 512, False),  # sigmoid at the quickstart's size
        (3.79, 512, True),  # a bigram model at that size
        (math.inf, 512, True),
        (math.nan, 512, True),
    ],
)
def test_has_failed_for_nonfinite_or_context_free_loss(loss, vocabulary, fails):
    assert sweep_table.has_failed(loss, vocabulary) == fails


def write_finished_run(folder, loss, vocabulary=512):
    """Make the folder of a finished run and return its last metrics."""
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(dict(model=dict(vocabulary=vocabulary))))
    lines = [dict(step=0, seconds=0, **{'valid/loss': 6.3}), dict(step=9, seconds=1, **{'valid/loss': loss})]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return sweep_table.read_last_metrics(RunDir(folder))


@pytest.mark.parametrize(
    ('published', 'losses', 'outcomes', 'expected'),
    [
        ({'fails': True}, (5.5, 5.6), 'done done', 'failed 2/2, published: fails'),
        ({'fails': True}, (5.5,), 'done diverged', 'failed 1/2, diverged 1/2, published: fails'),
        ({'fails': True}, (5.5, 2.8), 'done done', 'failed 1/2, done 1/2, published: fails'),
        ({'fails': True}, (2.9, 2.8), 'done done', 'done 2/2, published: fails'),
        ({'fails': True}, (), 'diverged diverged', 'diverged 2/2, published: fails'),
        ({'sink/1': 1.0}, (5.5, 5.6), 'done done', 'done 2/2'),
        ({}, (2.9, 2.8, 2.7), 'done diverged done', 'done 2/3, diverged 1/3'),
    ],
)
def test_sweep_table_counts_failed_runs_of_row_published_as_failing(tmp_path, published, losses, outcomes, expected):
    metrics_by_seed = {seed: write_finished_run(tmp_path / str(seed), loss) for seed, loss in enumerate(losses)}
    row_info = dict(config='x.py', row='a', published=published)
    [row] = sweep_table.make_sweep_table(
        [sweep_table.RowResult(row_info, dict(enumerate(outcomes.split())), {}, metrics_by_seed)]
    )
    assert row['outcome'] == expected
    assert 'fails' not in row['ours']


def test_published_metric_is_registered_or_has_reason():
    names = {name for module, row in ROWS for name in module.ROWS[row]['published']}
    assert {name for name in names - {'valid/loss', 'fails'} if registry.find_metric_info(name) is None} == set(
        REASONS_NOT_COMPARED
    )
    assert all(REASONS_NOT_COMPARED.values())
