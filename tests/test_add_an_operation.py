"""Guide to adding an operation: its edits and commands, applied to a copy of the tree."""

import json

import numpy as np
import pytest
from doc_pages import NEEDS_GIT, make_edited_copy, read_commands, run_command

PAGE = 'guides/add_an_operation.md'
SCRIPT = """
import sys
import numpy as np
from sinklab.configs.softplus import get_config
from sinklab.attn.reference import attend
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.operations import resolve_operation
from sinklab.attn.spec import AttentionSpec
from sinklab.config.validate import parse_config

given = np.load('given.npy')
for row in ('softplus', 'softplus_unnormalized'):
    spec = parse_config(get_config(row).to_dict())
    asked = AttentionSpec(resolve_operation(spec.model.attention, 1), make_causal_mask(given.shape[2]))
    found = attend(*given, asked)
    np.savez(f'{row}.npz', found.output_BTHK, found.attention_BHTS)
"""


pytestmark = [pytest.mark.slow, NEEDS_GIT]


@pytest.fixture
def tree(tmp_path):
    return make_edited_copy(tmp_path / 'sinklab', PAGE)


def test_guide_adds_operation_with_listed_rows_and_correct_weights(tree):
    assert all(
        row in run_command(tree, read_commands(PAGE, 'sinklab rows')[0])
        for row in ('softplus', 'softplus_unnormalized')
    )
    check_weights(tree)


@pytest.mark.exhaustive
def test_guide_commands_test_train_and_sweep_operation(tree):
    for prefix in ('pytest', 'sinklab rows', 'sinklab train', 'sinklab sweep'):
        assert read_commands(PAGE, prefix), f'the page does without {prefix}'
    for command in read_commands(PAGE):
        run_command(tree, command)
    check_run(tree / 'runs' / 'softplus')
    check_sweep(tree / 'runs' / 'softplus_sweep')


def check_weights(tree):
    """Check A_ij = log(1 + e^s_ij), normalized or not, and o_i = sum_j A_ij v_j against float64."""
    query_BTHK, key_BTHK, value_BTHK = inputs = 1.5 * np.random.default_rng(0).normal(size=(3, 2, 6, 3, 4))
    np.save(tree / 'given.npy', inputs.astype(np.float32))
    run_command(tree, '.venv/bin/python -', SCRIPT)
    score_BHTT = np.einsum('bthk,bshk->bhts', query_BTHK, key_BTHK) / np.sqrt(4)
    weight_BHTT = np.where(np.tri(6, dtype=bool), np.log(1 + np.exp(score_BHTT)), 0)
    total_BHT1 = weight_BHTT.sum(-1, keepdims=True)
    for row, expected in (('softplus', weight_BHTT / total_BHT1), ('softplus_unnormalized', weight_BHTT)):
        output_BTHK, attention_BHTT = np.load(tree / f'{row}.npz').values()
        np.testing.assert_allclose(attention_BHTT, expected, rtol=1e-4, atol=1e-5)
        expected_output = np.einsum('bhts,bshk->bthk', expected, value_BTHK)
        np.testing.assert_allclose(output_BTHK, expected_output, rtol=1e-4, atol=1e-3)


def check_run(folder):
    last_record = json.loads((folder / 'metrics.jsonl').read_text().splitlines()[-1])
    assert np.isfinite([last_record['valid/loss'], last_record['sink/1']]).all()
    assert last_record['mass/row'] == pytest.approx(1, abs=1e-3)
    assert json.loads((folder / 'config.json').read_text())['model']['attention']['similarity'] == 'softplus'


def check_sweep(folder):
    outcomes = {row['row']: row['outcome'] for row in json.loads((folder / 'sweep.json').read_text())}
    assert outcomes == {'softplus': 'done 2/2', 'softplus_unnormalized': 'done 2/2'}
