"""A sink of known mass in one head, and a token of known length: every measure that should find them does."""

import dataclasses

import numpy as np
import pytest

from sinklab.metrics import emergence, registry, sink
from sinklab.metrics.metric import MetricSetting

L, P, H, T, K, D, KEYS = 4, 3, 5, 24, 6, 8, 10
MASS, LONG = 0.625, 50.0  # of every query that sees the token; of the stream's token, beside 1
SETTING = MetricSetting(
    length=T, columns=0, implicit=False, gain=1.0, keys=KEYS, prefix=0, window=None, reach=T, triggers=False
)
SETTING = dataclasses.replace(SETTING, lengths=(12, T), thresholds=(0.3, 0.6, 0.65))


def planted(layer, head, place, rng):
    """Uniform attention, but for a head that gives MASS to a place (from 0) and shares out the rest."""
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
    """(layer, head, place; numbers; the arrays of a file)."""
    given = planted(*request.param, np.random.default_rng(0))
    return request.param, *measured(given)


def measured(given):
    among = registry.select_measurable(given)
    kept = registry.compute_arrays(given, SETTING, among)
    return registry.compute_numbers(kept, SETTING, among), registry.select_saved_arrays(kept, SETTING, among)


def alpha_of(place, length=T):
    """alpha of the token in its head: MASS, and 1 where the first token sees itself alone."""
    return MASS + (1 - MASS) / length * (place == 0)


def test_importance_is_its_mass_at_its_place_layer_and_head(found):
    (layer, head, place), numbers, arrays = found
    alpha_LPHJ = arrays['alpha_LPHJ']
    np.testing.assert_allclose(alpha_LPHJ[layer, :, head, place], alpha_of(place), rtol=1e-6)
    above = np.argwhere(alpha_LPHJ.mean(1) > sink.SINK_THRESHOLD).tolist()
    assert above == [[layer, head, place]]
    np.testing.assert_allclose(numbers[f'sink/{place + 1}'], 100 / (L * H))
    assert sum(numbers[f'sink/{k + 1}'] for k in range(KEYS)) == numbers[f'sink/{place + 1}']


def test_the_place_is_told_whichever_it_is(found):
    (layer, head, place), numbers, arrays = found
    assert (arrays['place_LPH'][layer, :, head] == place).all()
    np.testing.assert_allclose(arrays['most_LPH'][layer, :, head], alpha_of(place), rtol=1e-6)
    np.testing.assert_allclose(numbers['sink/any'], 100 / (L * H))
    assert {name: value for name, value in numbers.items() if name.startswith('place/') and value} == {
        f'place/{place + 1}': 100.0
    }


def test_shorter_texts_have_it_up_to_a_threshold_that_is_its_mass(found):
    (_, _, place), numbers, _ = found
    for length in SETTING.lengths:
        rates = [numbers[f'sink/{place + 1}/T{length}@{eps:g}'] for eps in SETTING.thresholds]
        expected = [100 / (L * H) * (alpha_of(place, length) > eps) for eps in SETTING.thresholds]
        np.testing.assert_allclose(rates, expected)


def test_attention_is_least_spread_where_it_is(found):
    (layer, head, _), _, arrays = found
    assert np.unravel_index(arrays['entropy_LH'].argmin(), (L, H)) == (layer, head)


def test_what_the_first_token_adds_is_told_where_it_is_the_sink(found):
    (layer, head, place), _, arrays = found
    largest = np.unravel_index(arrays['contribution_LH'].argmax(), (L, H))
    assert (largest == (layer, head)) == (place == 0)


def test_a_long_token_is_found_by_the_largest_entry_and_by_its_norm(found):
    (layer, _, place), numbers, _ = found
    largest = [numbers[f'spike/top/{number:02}'] for number in range(1, L + 1)]
    assert all(value > LONG / D**0.5 for value in largest[layer:])
    assert all(value <= 1 for value in largest[:layer])
    first = [numbers[f'norm/ratio/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(first[layer:], LONG if place == 0 else (T - 1) / (T - 2 + LONG), rtol=1e-5)


@pytest.mark.parametrize('place', [0, 2, 7])
def test_the_norm_of_the_sinks_own_token_is_told_where_most_heads_have_it(place):
    layer, head = 1, 3
    given = planted(layer, head, place, np.random.default_rng(0))
    given['attention_LPHTS'][:] = given['attention_LPHTS'][layer, :, head][None, :, None]
    numbers, _ = measured(given)
    own = [numbers[f'norm/own/{number:02}'] for number in range(1, L + 1)]
    np.testing.assert_allclose(own, [1.0] * layer + [LONG] * (L - layer), rtol=1e-5)


def test_it_emerges_with_its_head_at_its_step(found):
    (layer, head, place), _, arrays = found
    alpha_LH = arrays['alpha_LPHJ'][..., place].mean(1)
    steps = [0, 10, 20]
    assert emergence.find_first_heads(steps, [alpha_LH * 0, alpha_LH, alpha_LH], 0.3) == [(10, layer + 1, head + 1)]
