"""Probes of long texts: relative positions beyond the farthest distance."""

import json

import formulas
import numpy as np
import pytest
import tiny_runs as runs

from sinklab.cli.main import main
from sinklab.metrics import propositions

pytestmark = pytest.mark.slow


def run_measure(path, monkeypatch, capsys, *arguments):
    """Return the JSON output of `sinklab measure` for a run."""
    monkeypatch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
    assert main(['measure', str(path), '--json', *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize('kind', formulas.RELATIVE_POSITIONS[:1])
def test_proposition_2_holds_beyond_farthest_distance(corpus, tmp_path, monkeypatch, capsys, kind):
    """Repeat one token 160 times, so that keys from distance 128 on share one weight."""
    spec = runs.make_spec(corpus, model__position=kind, data__length=160, optimizer__steps=3, valid__windows=2)
    runs.train_run(spec, tmp_path / 'run')
    arguments = '--length=160', '--sequences=2', '--inputs=repeated', '--out', str(tmp_path / 'out')
    output = run_measure(tmp_path / 'run', monkeypatch, capsys, *arguments)
    numbers = output['inputs']['repeated']
    assert max(value for name, value in numbers.items() if name.startswith('repeated/spread/')) <= 1e-4
    assert numbers['repeated/relative'] <= 1e-5
    with np.load(tmp_path / 'out' / 'repeated.npz') as arrays:
        alpha_LPHJ = arrays['alpha_LPHJ']
    attention_TS = compute_closed_form(kind, 160)
    np.testing.assert_array_equal(attention_TS[159, :32], attention_TS[159, 0])
    expected = [attention_TS[k:, k].mean() for k in range(alpha_LPHJ.shape[-1])]
    np.testing.assert_allclose(alpha_LPHJ, np.broadcast_to(expected, alpha_LPHJ.shape), rtol=1e-4)


def compute_closed_form(kind, length):
    """Return softmax_i g(t - i), with g as printed in the papers."""
    weight_TS = np.tri(length) * np.exp(formulas.compute_position_bias(kind, np.arange(length), 1)[0])
    return weight_TS / weight_TS.sum(-1, keepdims=True)


@pytest.mark.parametrize('kind', formulas.RELATIVE_POSITIONS)
@pytest.mark.parametrize('change', [None, 'far', 'text'])
def test_proposition_2_holds_only_for_softmax_of_distance(kind, change):
    """Break it by another weight beyond distance 128, or by weights that depend on the text."""
    attention_TS = compute_closed_form(kind, 160)
    if change == 'far':
        attention_TS[150, 3] += 0.01
    if change == 'text':
        attention_TS[20, 7] += 0.01
    difference = np.abs(attention_TS - propositions.apply_last_row_by_distance(attention_TS)).max()
    assert (difference <= 1e-5) == (change is None)
