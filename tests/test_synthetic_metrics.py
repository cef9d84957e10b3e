"""Metrics of synthetic arrays with a sink of known mass in one head and a token of known norm."""

import dataclasses

import numpy as np
import pytest

from sinklab.metrics import emergence, registry, sink
from sinklab.metrics.metric import MetricSetting

L, P, H, T, K, D, KEYS = 4, 3, 5, 24, 6, 8, 10
MASS, LONG = 0.625, 50.0  # attention mass from every query that sees the token; norm of the token among norms of 1
SETTING = MetricSetting(
    length=T, columns=0, implicit=False, gain=1.0, keys=KEYS, prefix=0, window=None, reach=T, triggers=False
)
SETTING = dataclasses.replace(SETTING, lengths=(12, T), thresholds=(0.3, 0.6, 0.65))


def plant_sink(layer, head, place, rng):
    """Return arrays of uniform attention, except that one head gives MASS to one position (from 0)."""
    attention_TS = np.tri(T) / np.arange(1, T + 1)[:, None]
    attention = np.broadcast_to(attention_TS, (L, P, H, T, T)).copy()
    for query in range(place, T):
        row = attention[layer, :, head, query]
        row[:, : query + 1] = (1 - MASS) / max(1, query)
        row[:, place] = MASS if query else 1.0
    arrays = dict(query_LPTHK=(T, H, K), key_LPSHK=(T, H, K), value_LPSHK=(T, H, K), normed_LPTD=(T, D))
    arrays = {name: rng.normal(size=(L, P, *shape)) for name, shape in arrays.items()}
    residual = rng.normal(size=(L, P, T, D))
    residual /= np.linalg.norm(residual, axis=-1, keepdims=True)
    residual[layer:, :, place] *= LONG
    arrays |= dict(attention_LPHTS=attention, residual_LPTD=residual)
    arrays['head_LPTHK'] = np.einsum('lphts,lpshk->lpthk', attention, arrays['value_LPSHK'])
    return {name: np.float32(array) for name, array in arrays.items()}


@pytest.fixture(params=[(0, 0, 0), (2, 3, 0), (1, 4, 2), (3, 2, 7)], ids=str, scope='module')
def probe(request):
    """Return ((layer, head, position), metrics, arrays of a probe file)."""
    arrays = plant_sink(*request.param, np.random.default_rng(0))
    return request.param, *measure(arrays)


def measure(arrays):
    measures = registry.select_measurable(arrays)
    probe_arrays = registry.compute_arrays(arrays, SETTING, measures)
    return registry.compute_numbers(probe_arrays, SETTING, measures), registry.select_saved_arrays(
        probe_arrays, SETTING, measures
    )


def compute_alpha(place, length=T):
    """Return alpha of the token in its head: MASS, and 1 for a first token that sees only itself."""
    return MASS + (1 - MASS) / length * (place == 0)


def test_sink_importance_equals_mass_at_its_position_layer_and_head(probe):
    (layer, head, place), metrics, arrays = probe
    alpha_LPHJ = arrays['alpha_LPHJ']
    np.testing.assert_allclose(alpha_LPHJ[layer, :, head, place], compute_alpha(place), rtol=1e-6)
    positions = np.argwhere(alpha_LPHJ.mean(1) > sink.SINK_THRESHOLD).tolist()
    assert positions == [[layer, head, place]]
    np.testing.assert_allclose(metrics[f'sink/{place + 1}'], 100 / (L * H))
    assert sum(metrics[f'sink/{k + 1}'] for k in range(KEYS)) == metrics[f'sink/{place + 1}']


def test_sink_position_is_reported_for_any_position(probe):
    (layer, head, place), metrics, arrays = probe
    assert (arrays['place_LPH'][layer, :, head] == place).all()
    np.testing.assert_allclose(arrays['most_LPH'][layer, :, head], compute_alpha(place), rtol=1e-6)
    np.testing.assert_allclose(metrics['sink/any'], 100 / (L * H))
    assert {name: value for name, value in metrics.items() if name.startswith('place/') and value} == {
        f'place/{place + 1}': 100.0
    }


def test_sink_rate_of_shorter_texts_depends_on_threshold(probe):
    (_, _, place), metrics, _ = probe
    for length in SETTING.lengths:
        rates = [metrics[f'sink/{place + 1}/T{length}@{eps:g}'] for eps in SETTING.thresholds]
        expected = [100 / (L * H) * (compute_alpha(place, length) > eps) for eps in SETTING.thresholds]
        np.testing.assert_allclose(rates, expected)


def test_sink_head_has_lowest_entropy(probe):
    (layer, head, _), _, arrays = probe
    assert np.unravel_index(arrays['entropy_LH'].argmin(), (L, H)) == (layer, head)


def test_sink_head_has_largest_contribution_only_for_first_token(probe):
    (layer, head, place), _, arrays = probe
    largest = np.unravel_index(arrays['contribution_LH'].argmax(), (L, H))
    assert (largest == (layer, head)) == (place == 0)


def test_large_token_is_found_by_largest_entry_and_norm_ratio(probe):
    (layer, _, place), metrics, _ = probe
    largest = [metrics[f'spike/top/{number:02}'] for number in range(1, L + 1)]
    assert all(value > LONG / D**0.5 for value in largest[layer:])
    assert all(value <= 1 for value in largest[:layer])
    first = [metrics[f'norm/ratio/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(first[layer:], LONG if place == 0 else (T - 1) / (T - 2 + LONG), rtol=1e-5)


@pytest.mark.parametrize('place', [0, 2, 7])
def test_own_norm_reports_norm_of_sink_token_of_most_heads(place):
    layer, head = 1, 3
    arrays = plant_sink(layer, head, place, np.random.default_rng(0))
    arrays['attention_LPHTS'][:] = arrays['attention_LPHTS'][layer, :, head][None, :, None]
    metrics, _ = measure(arrays)
    norms = [metrics[f'norm/own/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(norms, [1.0] * layer + [LONG] * (L - layer), rtol=1e-5)


def test_find_first_heads_returns_step_layer_and_head_of_sink(probe):
    (layer, head, place), _, arrays = probe
    alpha_LH = arrays['alpha_LPHJ'][..., place].mean(1)
    steps = [0, 10, 20]
    assert emergence.find_first_heads(steps, [alpha_LH * 0, alpha_LH, alpha_LH], 0.3) == [(10, layer + 1, head + 1)]
