"""Metrics of synthetic arrays with a sink of known mass in one head and a token of known norm."""

import dataclasses

import numpy as np
import pytest

from sinklab.metrics import emergence, registry, sink
from sinklab.metrics.metric import MetricSetting

L, P, H, T, K, D, KEYS = 4, 3, 5, 24, 6, 8, 10
# Attention mass that the token receives from every query that sees it, and its norm (other tokens have norm 1).
MASS, LARGE_NORM = 0.625, 50.0
SETTING = MetricSetting(
    length=T, columns=0, implicit=False, gain=1.0, keys=KEYS, prefix=0, window=None, reach=T, triggers=False
)
SETTING = dataclasses.replace(SETTING, lengths=(12, T), thresholds=(0.3, 0.6, 0.65))


def make_arrays_with_sink(layer, head, position, rng):
    """Return arrays of uniform attention, except that one head gives MASS to one position (from 0)."""
    attention_TS = np.tri(T) / np.arange(1, T + 1)[:, None]
    attention = np.broadcast_to(attention_TS, (L, P, H, T, T)).copy()
    for query in range(position, T):
        row = attention[layer, :, head, query]
        row[:, : query + 1] = (1 - MASS) / max(1, query)
        row[:, position] = MASS if query else 1.0
    arrays = dict(query_LPTHK=(T, H, K), key_LPSHK=(T, H, K), value_LPSHK=(T, H, K), normed_LPTD=(T, D))
    arrays = {name: rng.normal(size=(L, P, *shape)) for name, shape in arrays.items()}
    residual = rng.normal(size=(L, P, T, D))
    residual /= np.linalg.norm(residual, axis=-1, keepdims=True)
    residual[layer:, :, position] *= LARGE_NORM
    arrays |= dict(attention_LPHTS=attention, residual_LPTD=residual)
    arrays['head_LPTHK'] = np.einsum('lphts,lpshk->lpthk', attention, arrays['value_LPSHK'])
    return {name: np.float32(array) for name, array in arrays.items()}


@pytest.fixture(params=[(0, 0, 0), (2, 3, 0), (1, 4, 2), (3, 2, 7)], ids=str, scope='module')
def probe(request):
    """Return ((layer, head, position), metrics, arrays of a probe file)."""
    arrays = make_arrays_with_sink(*request.param, np.random.default_rng(0))
    return request.param, *compute_metrics_and_arrays(arrays)


def compute_metrics_and_arrays(arrays):
    measures = registry.select_measurable(arrays)
    probe_arrays = registry.compute_arrays(arrays, SETTING, measures)
    return registry.compute_numbers(probe_arrays, SETTING, measures), registry.select_saved_arrays(
        probe_arrays, SETTING, measures
    )


def compute_alpha(position, length=T):
    """Return alpha of the token in its head: MASS, and 1 for a first token that sees only itself."""
    return MASS + (1 - MASS) / length * (position == 0)


def test_sink_importance_equals_mass_at_its_position_layer_and_head(probe):
    (layer, head, position), metrics, arrays = probe
    alpha_LPHJ = arrays['alpha_LPHJ']
    np.testing.assert_allclose(alpha_LPHJ[layer, :, head, position], compute_alpha(position), rtol=1e-6)
    positions = np.argwhere(alpha_LPHJ.mean(1) > sink.SINK_THRESHOLD).tolist()
    assert positions == [[layer, head, position]]
    np.testing.assert_allclose(metrics[f'sink/{position + 1}'], 100 / (L * H))
    assert sum(metrics[f'sink/{k + 1}'] for k in range(KEYS)) == metrics[f'sink/{position + 1}']


def test_sink_position_is_reported_for_any_position(probe):
    (layer, head, position), metrics, arrays = probe
    assert (arrays['place_LPH'][layer, :, head] == position).all()
    np.testing.assert_allclose(arrays['most_LPH'][layer, :, head], compute_alpha(position), rtol=1e-6)
    np.testing.assert_allclose(metrics['sink/any'], 100 / (L * H))
    assert {name: value for name, value in metrics.items() if name.startswith('place/') and value} == {
        f'place/{position + 1}': 100.0
    }


def test_sink_rate_of_shorter_texts_depends_on_threshold(probe):
    (_, _, position), metrics, _ = probe
    for length in SETTING.lengths:
        rates = [metrics[f'sink/{position + 1}/T{length}@{eps:g}'] for eps in SETTING.thresholds]
        expected = [100 / (L * H) * (compute_alpha(position, length) > eps) for eps in SETTING.thresholds]
        np.testing.assert_allclose(rates, expected)


def test_sink_head_has_lowest_entropy(probe):
    (layer, head, _), _, arrays = probe
    assert np.unravel_index(arrays['entropy_LH'].argmin(), (L, H)) == (layer, head)


def test_sink_head_has_largest_contribution_only_for_first_token(probe):
    (layer, head, position), _, arrays = probe
    largest = np.unravel_index(arrays['contribution_LH'].argmax(), (L, H))
    assert (largest == (layer, head)) == (position == 0)


def test_large_token_is_found_by_largest_entry_and_norm_ratio(probe):
    (layer, _, position), metrics, _ = probe
    largest = [metrics[f'spike/top/{number:02}'] for number in range(1, L + 1)]
    assert all(value > LARGE_NORM / D**0.5 for value in largest[layer:])
    assert all(value <= 1 for value in largest[:layer])
    ratios = [metrics[f'norm/ratio/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(
        ratios[layer:], LARGE_NORM if position == 0 else (T - 1) / (T - 2 + LARGE_NORM), rtol=1e-5
    )


@pytest.mark.parametrize('position', [0, 2, 7])
def test_own_norm_reports_norm_of_sink_token_of_most_heads(position):
    layer, head = 1, 3
    arrays = make_arrays_with_sink(layer, head, position, np.random.default_rng(0))
    arrays['attention_LPHTS'][:] = arrays['attention_LPHTS'][layer, :, head][None, :, None]
    metrics, _ = compute_metrics_and_arrays(arrays)
    norms = [metrics[f'norm/own/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(norms, [1.0] * layer + [LARGE_NORM] * (L - layer), rtol=1e-5)


def test_find_first_heads_returns_step_layer_and_head_of_sink(probe):
    (layer, head, position), _, arrays = probe
    alpha_LH = arrays['alpha_LPHJ'][..., position].mean(1)
    steps = [0, 10, 20]
    assert emergence.find_first_heads(steps, [alpha_LH * 0, alpha_LH, alpha_LH], 0.3) == [(10, layer + 1, head + 1)]
