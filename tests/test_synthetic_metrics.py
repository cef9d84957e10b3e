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


def planted(layer, head, place, rng):
    """Return arrays of uniform attention, except that one head gives MASS to one position (from 0)."""
    attention_TS = np.tri(T) / np.arange(1, T + 1)[:, None]
    attention = np.broadcast_to(attention_TS, (L, P, H, T, T)).copy()
    for query in range(place, T):
        row = attention[layer, :, head, query]
        row[:, : query + 1] = (1 - MASS) / max(1, query)
        row[:, place] = MASS if query else 1.0
    found = dict(query_LPTHK=(T, H, K), key_LPSHK=(T, H, K), value_LPSHK=(T, H, K), normed_LPTD=(T, D))
    found = {name: rng.normal(size=(L, P, *shape)) for name, shape in found.items()}
    residual = rng.normal(size=(L, P, T, D))
    residual /= np.linalg.norm(residual, axis=-1, keepdims=True)
    residual[layer:, :, place] *= LONG
    found |= dict(attention_LPHTS=attention, residual_LPTD=residual)
    found['head_LPTHK'] = np.einsum('lphts,lpshk->lpthk', attention, found['value_LPSHK'])
    return {name: np.float32(array) for name, array in found.items()}


@pytest.fixture(params=[(0, 0, 0), (2, 3, 0), (1, 4, 2), (3, 2, 7)], ids=str, scope='module')
def found(request):
    """Return ((layer, head, position), numbers, arrays of a probe file)."""
    given = planted(*request.param, np.random.default_rng(0))
    return request.param, *measured(given)


def measured(given):
    among = registry.select_measurable(given)
    kept = registry.compute_arrays(given, SETTING, among)
    return registry.compute_numbers(kept, SETTING, among), registry.select_saved_arrays(kept, SETTING, among)


def alpha_of(place, length=T):
    """Return alpha of the token in its head: MASS, and 1 for a first token that sees only itself."""
    return MASS + (1 - MASS) / length * (place == 0)


def test_sink_importance_equals_mass_at_its_position_layer_and_head(found):
    (layer, head, place), numbers, arrays = found
    alpha_LPHJ = arrays['alpha_LPHJ']
    np.testing.assert_allclose(alpha_LPHJ[layer, :, head, place], alpha_of(place), rtol=1e-6)
    above = np.argwhere(alpha_LPHJ.mean(1) > sink.SINK_THRESHOLD).tolist()
    assert above == [[layer, head, place]]
    np.testing.assert_allclose(numbers[f'sink/{place + 1}'], 100 / (L * H))
    assert sum(numbers[f'sink/{k + 1}'] for k in range(KEYS)) == numbers[f'sink/{place + 1}']


def test_sink_position_is_reported_for_any_position(found):
    (layer, head, place), numbers, arrays = found
    assert (arrays['place_LPH'][layer, :, head] == place).all()
    np.testing.assert_allclose(arrays['most_LPH'][layer, :, head], alpha_of(place), rtol=1e-6)
    np.testing.assert_allclose(numbers['sink/any'], 100 / (L * H))
    assert {name: value for name, value in numbers.items() if name.startswith('place/') and value} == {
        f'place/{place + 1}': 100.0
    }


def test_sink_rate_of_shorter_texts_depends_on_threshold(found):
    (_, _, place), numbers, _ = found
    for length in SETTING.lengths:
        rates = [numbers[f'sink/{place + 1}/T{length}@{eps:g}'] for eps in SETTING.thresholds]
        expected = [100 / (L * H) * (alpha_of(place, length) > eps) for eps in SETTING.thresholds]
        np.testing.assert_allclose(rates, expected)


def test_sink_head_has_lowest_entropy(found):
    (layer, head, _), _, arrays = found
    assert np.unravel_index(arrays['entropy_LH'].argmin(), (L, H)) == (layer, head)


def test_sink_head_has_largest_contribution_only_for_first_token(found):
    (layer, head, place), _, arrays = found
    largest = np.unravel_index(arrays['contribution_LH'].argmax(), (L, H))
    assert (largest == (layer, head)) == (place == 0)


def test_large_token_is_found_by_largest_entry_and_norm_ratio(found):
    (layer, _, place), numbers, _ = found
    largest = [numbers[f'spike/top/{number:02}'] for number in range(1, L + 1)]
    assert all(value > LONG / D**0.5 for value in largest[layer:])
    assert all(value <= 1 for value in largest[:layer])
    first = [numbers[f'norm/ratio/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(first[layer:], LONG if place == 0 else (T - 1) / (T - 2 + LONG), rtol=1e-5)


@pytest.mark.parametrize('place', [0, 2, 7])
def test_own_norm_reports_norm_of_sink_token_of_most_heads(place):
    layer, head = 1, 3
    given = planted(layer, head, place, np.random.default_rng(0))
    given['attention_LPHTS'][:] = given['attention_LPHTS'][layer, :, head][None, :, None]
    numbers, _ = measured(given)
    own = [numbers[f'norm/own/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(own, [1.0] * layer + [LONG] * (L - layer), rtol=1e-5)


def test_find_first_heads_returns_step_layer_and_head_of_sink(found):
    (layer, head, place), _, arrays = found
    alpha_LH = arrays['alpha_LPHJ'][..., place].mean(1)
    steps = [0, 10, 20]
    assert emergence.find_first_heads(steps, [alpha_LH * 0, alpha_LH, alpha_LH], 0.3) == [(10, layer + 1, head + 1)]
