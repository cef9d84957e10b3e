"""docs/add_an_operation.md to the letter: its edits in a copy of this tree, its commands there, what they made."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / 'docs' / 'add_an_operation.md'
PROGRAMS = {'sinklab': '-m sinklab', 'pytest': '-m pytest', 'python': ''}
OPERATION = """
import sys
import numpy as np
from configs.softplus import get_config
from sinklab.attend.dense import attend
from sinklab.attend.mask import causal
from sinklab.parse import parse

given = np.load('given.npy')
for row in ('softplus', 'softplus_unnormalized'):
    attention = parse(get_config(row).to_dict()).model.attention
    np.savez(f'{row}.npz', *attend(*given, attention, causal(given.shape[2])))
"""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which('git') is None, reason='the edits of the page are applied by git, which is not here'
    ),
]


@pytest.fixture
def tree(tmp_path):
    """A copy of this tree with the edits of the page."""
    tree = copy(tmp_path / 'sinklab')
    assert blocks('diff')
    for edit in blocks('diff'):
        ran(tree, 'git apply --verbose -', edit)
    return tree


def test_the_page_adds_an_operation_whose_rows_are_listed_and_whose_weights_are_the_formulas(tree):
    assert all(row in ran(tree, commands('sinklab rows')[0]) for row in ('softplus', 'softplus_unnormalized'))
    check_weights(tree)


@pytest.mark.exhaustive
def test_the_page_adds_an_operation_that_is_tested_trains_probes_and_sweeps(tree):
    for verb in ('pytest', 'sinklab rows', 'sinklab train', 'sinklab sweep'):
        assert commands(verb), f'the page does without {verb}'
    for command in commands():
        ran(tree, command)
    check_run(tree / 'runs' / 'softplus')
    check_sweep(tree / 'runs' / 'sweep')


def commands(verb=''):
    return [line for block in blocks('sh') for line in block.splitlines() if f'{verb} ' in line]


def blocks(kind):
    """The ```kind blocks of the page."""
    return re.findall(rf'^```{kind}\n(.*?)^```$', PAGE.read_text(encoding='utf-8'), re.MULTILINE | re.DOTALL)


def copy(tree):
    """The code as it stands in the working tree, with this interpreter where `make` would put one."""
    for name in ('sinklab', 'configs', 'tests'):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copy(ROOT / 'pyproject.toml', tree)
    bin = tree / '.venv' / 'bin'
    bin.mkdir(parents=True)
    for name, module in PROGRAMS.items():
        (bin / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (bin / name).chmod(0o755)
    return tree


def ran(tree, command, given=None):
    """Runs a command of the page in the tree; its processes find each other's compiled functions and tokens."""
    here = {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu', 'GIT_CEILING_DIRECTORIES': str(tree.parent)}
    environment = {**os.environ, **here}
    process = subprocess.run(
        command, shell=True, cwd=tree, env=environment, input=given, capture_output=True, text=True, timeout=1800
    )
    assert process.returncode == 0, f'$ {command}\n{given or ""}{process.stdout}{process.stderr}'
    return process.stdout


def check_weights(tree):
    """A_ij = log(1 + e^s_ij), over its sum or not, and o_i = sum_j A_ij v_j, in float64."""
    query_BTHK, key_BTHK, value_BTHK = given = 1.5 * np.random.default_rng(0).normal(size=(3, 2, 6, 3, 4))
    np.save(tree / 'given.npy', given.astype(np.float32))
    ran(tree, '.venv/bin/python -', OPERATION)
    score_BHTT = np.einsum('bthk,bshk->bhts', query_BTHK, key_BTHK) / np.sqrt(4)
    weight_BHTT = np.where(np.tri(6, dtype=bool), np.log(1 + np.exp(score_BHTT)), 0)
    total_BHT1 = weight_BHTT.sum(-1, keepdims=True)
    for row, expected in (('softplus', weight_BHTT / total_BHT1), ('softplus_unnormalized', weight_BHTT)):
        output_BTHK, attention_BHTT = np.load(tree / f'{row}.npz').values()
        np.testing.assert_allclose(attention_BHTT, expected, rtol=1e-4, atol=1e-5)
        aggregated = np.einsum('bhts,bshk->bthk', expected, value_BTHK)
        np.testing.assert_allclose(output_BTHK, aggregated, rtol=1e-4, atol=1e-3)


def check_run(folder):
    last = json.loads((folder / 'metrics.jsonl').read_text().splitlines()[-1])
    assert np.isfinite([last['valid/loss'], last['sink/1']]).all()
    assert last['mass/row'] == pytest.approx(1, abs=1e-3)
    assert json.loads((folder / 'config.json').read_text())['model']['attention']['similarity'] == 'softplus'


def check_sweep(folder):
    outcomes = {row['row']: row['outcome'] for row in json.loads((folder / 'sweep.json').read_text())}
    assert outcomes == {'softplus': 'done 2/2', 'softplus_unnormalized': 'done 2/2'}
