"""Texts as long as what is asked of them: the edge of a wide window, and positions that no longer tell keys apart."""

import json

import formulas
import numpy as np
import pytest
import runs

import sinklab
from sinklab.cli.main import main
from sinklab.measure import sink

pytestmark = pytest.mark.slow


def measured(path, monkeypatch, capsys, *given):
    """What `sinklab measure` says of a run."""
    monkeypatch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
    assert main(['measure', str(path), '--json', *given]) == 0
    return json.loads(capsys.readouterr().out)


def test_texts_longer_than_a_window_have_an_edge(corpus, tmp_path, monkeypatch, capsys):
    """A window of 64 is one of a text of 128 tokens, and none of a probe of 12."""
    spec = runs.spec(corpus, model__mask__window=64, data__length=128, optimizer__steps=3, valid__windows=2)
    [*_, record] = runs.train(spec, tmp_path / 'run')
    assert 'sink/1' in record
    assert 'alpha/edge' not in record
    given = '--length=128', '--sequences=2'
    numbers = measured(tmp_path / 'run', monkeypatch, capsys, *given, '--inputs=random')['inputs']['random']
    run = sinklab.open(tmp_path / 'run')
    ids_PT = np.random.default_rng(0).integers(run.subject.vocabulary, size=(2, 128))
    _, captured = run.model(ids_PT, capture=True)
    share_LPHTS = np.float64(captured.attention_BHTS)
    first = [share_LPHTS[..., t - 1, t - 64] for t in range(65, 129)]  # the oldest of 64 keys of query t
    within = share_LPHTS[..., :64, 0].mean(-1)
    assert numbers['alpha/edge'] == pytest.approx(np.mean(first), rel=1e-4)
    assert numbers['sink/edge'] == sink.rate(np.mean(first, 0))
    assert numbers['alpha/1/window'] == pytest.approx(within.mean(), rel=1e-4)
    assert numbers['alpha/floor'] == pytest.approx(sum(1 / t for t in range(1, 65)) / 128)
