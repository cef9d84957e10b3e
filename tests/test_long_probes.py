"""Probes of long texts: edges of wide windows, and relative positions beyond the farthest distance."""

import json

import formulas
import numpy as np
import pytest
import tiny_runs as runs
from conftest import make_case_params

import sinklab
from sinklab.cli.main import main
from sinklab.metrics import propositions, sink
from sinklab.metrics.propositions import RELATIVE_POSITIONS

pytestmark = pytest.mark.slow


def run_measure(path, monkeypatch, capsys, *arguments):
    """Return the JSON output of `sinklab measure` for a run."""
    monkeypatch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
    assert main(['measure', str(path), '--json', *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_longer_than_window_has_edge_metrics(corpus, tmp_path, monkeypatch, capsys):
    """Use a window of 64, which cuts a text of 128 tokens and does not cut a probe of 12."""
    spec = runs.make_spec(corpus, model__mask__window=64, data__length=128, optimizer__steps=3, valid__windows=2)
    [*_, record] = runs.train_run(spec, tmp_path / 'run')
    assert 'sink/1' in record
    assert 'alpha/edge' not in record
    arguments = '--length=128', '--sequences=2'
    metrics = run_measure(tmp_path / 'run', monkeypatch, capsys, *arguments, '--inputs=random')['inputs']['random']
    run = sinklab.open(tmp_path / 'run')
    ids_PT = np.random.default_rng(0).integers(run.subject.vocabulary, size=(2, 128))
    _, captures = run.model(ids_PT, capture=True)
    share_LPHTS = np.float64(captures.attention_BHTS)
    edge_shares = [share_LPHTS[..., t - 1, t - 64] for t in range(65, 129)]  # the oldest of 64 keys of query t
    window_shares = share_LPHTS[..., :64, 0].mean(-1)
    assert metrics['alpha/edge'] == pytest.approx(np.mean(edge_shares), rel=1e-4)
    assert metrics['sink/edge'] == sink.compute_sink_rate(np.mean(edge_shares, 0))
    assert metrics['alpha/1/window'] == pytest.approx(window_shares.mean(), rel=1e-4)
    assert metrics['alpha/floor'] == pytest.approx(sum(1 / t for t in range(1, 65)) / 128)


@pytest.mark.parametrize('kind', make_case_params(RELATIVE_POSITIONS, list(RELATIVE_POSITIONS)[:1]))
def test_proposition_2_holds_beyond_farthest_distance(corpus, tmp_path, monkeypatch, capsys, kind):
    """Repeat one token 160 times, so that keys from distance 128 on share one weight."""
    spec = runs.make_spec(corpus, model__position=kind, data__length=160, optimizer__steps=3, valid__windows=2)
    runs.train_run(spec, tmp_path / 'run')
    arguments = '--length=160', '--sequences=2', '--inputs=repeated', '--out', str(tmp_path / 'out')
    output = run_measure(tmp_path / 'run', monkeypatch, capsys, *arguments)
    [first_result, second_result] = output['propositions']
    assert second_result['claim'] == 'Proposition 2, repeated/relative'
    assert first_result['holds']
    assert second_result['holds']
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


@pytest.mark.parametrize('kind', RELATIVE_POSITIONS)
@pytest.mark.parametrize('change', [None, 'far', 'text'])
def test_proposition_2_holds_only_for_softmax_of_distance(kind, change):
    """Break it by another weight beyond distance 128, or by weights that depend on the text."""
    attention_TS = compute_closed_form(kind, 160)
    if change == 'far':
        attention_TS[150, 3] += 0.01
    if change == 'text':
        attention_TS[20, 7] += 0.01
    difference = np.abs(attention_TS - propositions.apply_last_row_by_distance(attention_TS)).max()
    assert (difference <= propositions.TOLERANCE) == (change is None)
