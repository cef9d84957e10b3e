"""What is measured of a finished model alone, against loops over one matrix, in NumPy's float64."""

import dataclasses

import formulas
import jax
import numpy as np
import pytest
from conftest import drawn, operation, tiny
from scipy import stats

from sinklab.metrics import (
    angles,
    emergence,
    hidden_states,
    massive_activations,
    propositions,
    registry,
    sink_position,
)
from sinklab.metrics.metric import MetricSetting, extract_arrays, make_setting
from sinklab.model.learned_kv import count_learned_kv
from sinklab.train.forward import make_forward

L, P, H, T, K, D, KEYS = 3, 2, 2, 12, 4, 8, 3
SINK = next(measure for measure in registry.OFFLINE_METRICS if measure.inputs == ('sink_LPCD',))
SETTING = MetricSetting(
    length=T,
    columns=1,
    implicit=False,
    gain=1.0,
    keys=KEYS,
    prefix=0,
    window=None,
    reach=T,
    triggers=False,
    lengths=(4, 9, T),
    thresholds=(0.1, 0.3),
)


@pytest.fixture(scope='module')
def arrays():
    rng = np.random.default_rng(0)
    attention = rng.random((L, P, H, T, 1 + T)) * np.tri(T, 1 + T, 1)
    attention[..., 3] *= 9 * (rng.random((L, P, H, 1)) > 0.5)
    attention = attention / attention.sum(-1, keepdims=True)
    shapes = dict(query_LPTHK=(T, H, K), key_LPSHK=(1 + T, H, K), value_LPSHK=(1 + T, H, K), head_LPTHK=(T, H, K))
    shapes |= dict(normed_LPTD=(T, D), residual_LPTD=(T, D), sink_LPCD=(1, D))
    found = {name: rng.normal(size=(L, P, *shape)) for name, shape in shapes.items()}
    found['residual_LPTD'][:, :, 0] *= 40
    found['residual_LPTD'][1:, :, 5] = found['residual_LPTD'][1:, :, 0] * 0.5
    return {name: np.float32(array) for name, array in (found | {'attention_LPHTS': attention}).items()}


@pytest.fixture(scope='module')
def numbers(arrays):
    among = registry.select_measurable(arrays)
    return registry.compute_numbers(registry.compute_arrays(arrays, SETTING, among), SETTING, among)


def each(shape):
    return np.ndindex(*shape)


def test_queries_and_keys_are_compared_pair_by_pair(arrays, numbers):
    expected = formulas.qk_numbers(arrays['query_LPTHK'], arrays['key_LPSHK'][:, :, 1:])
    assert len(expected) == 9
    for name, value in expected.items():
        np.testing.assert_allclose(numbers[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_norms_of_queries(arrays, numbers):
    norm = np.linalg.norm(np.float64(arrays['query_LPTHK']), axis=-1)
    expected = norm[:, :, 0].mean(), norm[:, :, 1:].mean()
    np.testing.assert_allclose([numbers['norm/query/1'], numbers['norm/query/other']], expected, rtol=1e-5)


def test_the_rank_of_keys_is_that_of_their_covariance_over_texts(arrays, numbers):
    for name, place in (('1', 0), ('middle', T // 2)):
        found = []
        for layer, head in each((L, H)):
            values = np.linalg.eigvalsh(
                np.cov(np.float64(arrays['key_LPSHK'][layer, :, 1 + place, head]), rowvar=False)
            )
            found.append(values.sum() ** 2 / (values**2).sum())
        np.testing.assert_allclose(numbers[f'key/rank/{name}'], np.mean(found), rtol=1e-5)


def test_numbers_of_several_parts_have_labels():
    assert registry.find_metric_info('sink/2/T16@0.25').label == 'Sink_2, T 16 > 0.25'
    assert registry.find_metric_info('sink/1/T16@1e-05').label == 'Sink_1, T 16 > 1e-05'
    assert registry.find_metric_info('alpha/1/T8').label == 'alpha_1, T 8'
    assert registry.find_metric_info('sink/first') is None


def test_keys_that_are_equal_have_rank_one():
    one_LPHK = np.random.default_rng(0).normal(size=(1, 1, 2, 64)).astype(np.float32).repeat(50, 1)
    signs = np.random.default_rng(1).choice([-1, 1], one_LPHK.shape).astype(np.float32)
    for keys in (one_LPHK, np.nextafter(one_LPHK, signs * np.inf, dtype=np.float32)):  # and but for rounding
        np.testing.assert_array_equal(angles.compute_effective_rank(keys), 1)


def test_where_nothing_rises_there_is_no_secondary_sink_and_where_nothing_falls_all_blocks_are_between():
    alike = np.ones((12, 1, 3))
    assert hidden_states.count_secondary_sinks(alike[:1], np.ones(1)) == 0.0
    assert hidden_states.count_secondary_sinks(alike, np.linspace(9, 1, 12)) == 0.0
    assert hidden_states.count_secondary_sinks(alike, np.array([1.0, *np.linspace(50, 90, 11)])) == 2.0


@pytest.mark.slow
def test_keys_on_a_line_have_rank_one_and_in_a_ball_many():
    rng = np.random.default_rng(0)
    line, ball = rng.normal(size=(2000, 1)) * np.ones(6), rng.normal(size=(2000, 6))
    ranks = angles.compute_effective_rank(np.stack([line, ball], 1)[None])
    np.testing.assert_allclose(ranks[0], [1, 6], atol=0.1)


def test_spikes_after_every_block(arrays, numbers):
    for layer, residual_PTD in enumerate(np.float64(arrays['residual_LPTD']), 1):
        flat = [residual.ravel() for residual in residual_PTD]
        expected = {
            'top': np.mean([np.abs(h).max() for h in flat]),
            'over_median': np.mean([np.abs(h).max() / np.median(np.abs(h)) for h in flat]),
            'kurtosis': np.mean([stats.kurtosis(h, fisher=False) for h in flat]),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(numbers[f'spike/{name}/{layer:02}'], value, rtol=1e-5)
        norm = np.linalg.norm(np.float64(arrays['normed_LPTD'][layer - 1]), axis=-1).mean(0)
        np.testing.assert_allclose(numbers[f'norm/normed/{layer:02}'], norm[0] / norm[1:].mean(), rtol=1e-5)


def test_massive_is_what_is_above_both_of_its_bounds():
    residual = np.ones((1, 1, 10, 100), np.float32)
    residual[0, 0, 0, :3] = 99, 101, 1500  # below 100; below 1000 medians; above both
    assert massive_activations.compute_activation_statistics(residual)['massive_LP'].tolist() == [[1.0]]


def test_the_spectrum_and_the_mixing_of_hidden_states(arrays, numbers):
    for layer, residual_PTD in enumerate(np.float64(arrays['residual_LPTD']), 1):
        entropies, alike = [], []
        for h in residual_PTD:
            share = np.linalg.svd(h, compute_uv=False) ** 2
            share /= share.sum()
            entropies.append(-sum(one * np.log(one) for one in share if one > 0))
            unit = h / np.linalg.norm(h, axis=-1, keepdims=True)
            alike.append(np.mean([unit[s] @ unit[t] for s in range(1, T) for t in range(1, T) if s != t]))
        np.testing.assert_allclose(numbers[f'spectrum/{layer:02}'], np.mean(entropies), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(numbers[f'mixing/{layer:02}'], np.mean(alike), rtol=1e-4, atol=1e-6)


def test_equal_tokens_have_no_spectrum_and_orthogonal_ones_the_widest():
    same, other = np.ones((5, 8), np.float32), np.eye(5, 8, dtype=np.float32)
    entropy = hidden_states.compute_spectral_entropy(
        hidden_states.compute_gram_matrices(np.stack([same, other])[None])
    )
    np.testing.assert_allclose(entropy[0], [0, np.log(5)], atol=1e-5)
    cosines = hidden_states.compute_cosines(hidden_states.compute_gram_matrices(np.stack([same, other])[None]))
    np.testing.assert_allclose(hidden_states.compute_mixing(cosines)[0], [1, 0], atol=1e-6)


def test_a_secondary_sink_is_like_the_first_token_for_more_than_four_blocks():
    layers, first = 9, np.array([1, 1, 50, 50, 50, 50, 50, 50, 1])  # blocks 3 to 8
    likeness = np.zeros((layers, 1, 4))
    likeness[..., 0] = 1
    likeness[2:7, 0, 1] = -0.95  # five of them
    likeness[2:6, 0, 2] = 0.95  # four
    likeness[[0, 1, 2, 3, 4, 8], 0, 3] = 0.95  # three, and others outside
    assert hidden_states.count_secondary_sinks(likeness, first) == 1.0


def test_sinks_are_found_wherever_they_are(arrays, numbers):
    A = np.float64(arrays['attention_LPHTS'])
    at, most = [], []
    for one in each((L, P, H)):
        alphas = [A[one][k:, 1 + k].sum() / (T - k) for k in range(T // 2)]
        at.append(int(np.argmax(alphas)))
        most.append(max(alphas))
    found = [place for place, alpha in zip(at, most, strict=True) if alpha > 0.3]
    assert 0 < len(found) < len(at), 'the draw has heads of both kinds'
    np.testing.assert_allclose(numbers['sink/any'], 100 * len(found) / len(at))
    for k in range(KEYS):
        np.testing.assert_allclose(numbers[f'place/{k + 1}'], 100 * found.count(k) / len(found))
    np.testing.assert_allclose(numbers['place/beyond'], 100 * sum(k >= KEYS for k in found) / len(found))


def test_shorter_texts_are_the_beginnings_of_long_ones(arrays, numbers):
    A = np.float64(arrays['attention_LPHTS'])
    for length in SETTING.lengths:
        for k in range(KEYS):
            alphas = [A[one][k:length, 1 + k].sum() / (length - k) for one in each((L, P, H))]
            np.testing.assert_allclose(numbers[f'alpha/{k + 1}/T{length}'], np.mean(alphas), rtol=1e-5)
            for threshold in SETTING.thresholds:
                rate = 100 * np.mean([alpha > threshold for alpha in alphas])
                np.testing.assert_allclose(numbers[f'sink/{k + 1}/T{length}@{threshold}'], rate)


def test_the_ratio_is_that_of_the_token_that_receives_most_be_it_a_sink_token(arrays):
    received = np.full((L, P, T // 2), 0.1)
    received[:, 0, 2], received[:, 1, 4] = 0.5, 0.6
    norm = np.linalg.norm(np.float64(arrays['residual_LPTD']), axis=-1)
    kept = dict(received_LPJ=received, norm_LPT=norm)
    expected = [
        np.mean([norm[layer, 0, 2], norm[layer, 1, 4]])
        / np.mean([np.delete(norm[layer, 0], 2).mean(), np.delete(norm[layer, 1], 4).mean()])
        for layer in range(L)
    ]
    np.testing.assert_allclose(sink_position.compute_sink_norm_ratio(kept), expected)
    kept |= dict(column_LPC=np.full((L, P, 1), 7.0), star_LPH=np.full((L, P, H), 0.9))
    np.testing.assert_allclose(sink_position.compute_sink_norm_ratio(kept), 7 / norm.mean((1, 2)))


@pytest.mark.parametrize(
    ('values', 'expected'),
    [
        ([0, 0, 10, 60, 100], (20, 30)),
        ([0, 80, 10, 60, 100], (20, 30)),  # it went again
        ([90, 100], (None, 0)),
        ([0, 0], None),
        ([0, 5, 0], None),
        ([], None),
    ],
)
def test_a_sink_emerges_where_it_is_past_half_of_its_end_for_good(values, expected):
    assert emergence.find_emergence([10 * n for n in range(len(values))], values) == expected


def test_heads_come_in_the_order_in_which_they_stay_above_a_threshold():
    alpha = np.zeros((4, 1, 3))
    alpha[1:, 0, 2] = 0.4
    alpha[0, 0, 1], alpha[3, 0, 1] = 0.9, 0.9  # not for good before the end
    assert emergence.find_first_heads([0, 5, 10, 15], alpha, 0.3) == [(5, 1, 3), (15, 1, 2)]


@pytest.mark.parametrize(
    'spec', [tiny(), tiny(model__columns__kind='sink_token'), operation(tiny(), 'exp', 'plus_one')]
)
@pytest.mark.slow
def test_a_model_shows_all_that_is_measured_and_a_probe_what_it_showed_before(spec):
    ids_PT = np.random.default_rng(0).integers(1, 300, (2, 12)).astype(np.int32)
    setting = make_setting(spec, 12, count_learned_kv(spec.model), lengths=(4, 12), thresholds=(0.3,))
    captured = jax.jit(lambda params: make_forward(spec, capture=True)(params, ids_PT)[2])(drawn(spec))
    found = extract_arrays(captured, setting)
    assert ('sink_LPCD' in found) == (spec.model.columns.kind == 'sink_token')
    among = registry.select_measurable(found)
    assert {*registry.METRICS, *registry.OFFLINE_METRICS} - {*among} == (
        {SINK} if 'sink_LPCD' not in found else set()
    )
    jax_numbers = registry.compute_numbers(
        jax.jit(lambda found: registry.compute_arrays(found, setting, among))(found), setting, among
    )
    plain = {name: np.asarray(array) for name, array in found.items()}
    numpy_numbers = registry.compute_numbers(registry.compute_arrays(plain, setting, among), setting, among)
    assert jax_numbers.keys() == numpy_numbers.keys()
    for name, value in numpy_numbers.items():
        np.testing.assert_allclose(jax_numbers[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('position', ['none', *propositions.RELATIVE_POSITIONS, 'relative_t5', 'alibi', 'rotary'])
def test_propositions_hold_of_any_weights_and_of_no_other_text(position):
    spec = tiny(model__position=position)
    for repeated in (True, False):
        ids_PT = np.full((2, 12), 7) if repeated else np.random.default_rng(0).integers(1, 300, (2, 12))
        found = numbers_of(spec, ids_PT.astype(np.int32), repeated=True)
        told = propositions.judge_propositions(position, found)
        assert told[0][2] == repeated
        assert len(told) == 1 + (position in propositions.PROPOSITIONS)
        if repeated or position == 'rotary':  # whose bound is of a repeated token, but far from tight
            assert all(holds for _, _, holds in told[1:])
    assert propositions.judge_propositions('learned', found) == []


def test_the_numbers_of_the_propositions_are_those_of_their_sentences(arrays):
    setting = dataclasses.replace(SETTING, repeated=True)
    among = registry.select_measurable(arrays)
    found = registry.compute_numbers(registry.compute_arrays(arrays, setting, among), setting, among)
    A, query, key = (np.float64(arrays[name]) for name in ('attention_LPHTS', 'query_LPTHK', 'key_LPSHK'))
    uneven, first, bound, relative = [], [], [], []
    for layer, text, head in each((L, P, H)):
        share = A[layer, text, head, :, 1:]
        longest = (np.linalg.norm(array[layer, text, :, head], axis=-1).max() for array in (query, key[:, :, 1:]))
        x = np.prod([*longest]) / np.sqrt(K)
        for t in range(1, T + 1):
            uneven += [abs(share[t - 1, i] - (i < t) / t) for i in range(T)]
            first.append(share[t - 1, 0] - 1 / t)
            weights = [share[T - 1, T - t + i] for i in range(t)]
            relative += [abs(share[t - 1, i] - (weights[i] / sum(weights) if i < t else 0)) for i in range(T)]
            bound += [share[t - 1, i] - np.exp(2 * x) / (np.exp(2 * x) + t - 1) for i in range(T)]
    expected = dict(uneven=max(uneven), first=max(first), bound=max(bound), relative=max(relative))
    for name, value in expected.items():
        np.testing.assert_allclose(found[f'repeated/{name}'], value, rtol=1e-4, atol=1e-6)


def numbers_of(spec, ids_PT, **how):
    """All that is measured of a model with drawn parameters."""
    setting = make_setting(spec, ids_PT.shape[1], count_learned_kv(spec.model), **how)
    captured = jax.jit(lambda params: make_forward(spec, capture=True)(params, ids_PT)[2])(drawn(spec))
    found = extract_arrays(captured, setting)
    among = registry.select_measurable(found)
    return registry.compute_numbers(registry.compute_arrays(found, setting, among), setting, among)
