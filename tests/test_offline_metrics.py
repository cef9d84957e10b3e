"""Tests of offline metrics against float64 NumPy loops over single matrices."""

import dataclasses
import json

import formulas
import jax
import numpy as np
import pytest
import reference
from scipy import stats
from tiny_specs import draw_params, make_tiny_spec, replace_operation

from sinklab.analysis import run_model
from sinklab.analysis.measure import MeasureRequest
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.metrics import (
    angles,
    emergence,
    heads,
    hidden_states,
    massive_activations,
    registry,
    sink_position,
)
from sinklab.metrics.metric import MetricContext, extract_arrays, make_context
from sinklab.model.learned_kv import count_learned_kv
from sinklab.parallel.device_mesh import make_one_device_mesh
from sinklab.train.step import make_hidden_states_fn

L, P, H, T, K, D, KEYS = 3, 2, 2, 12, 4, 8, 3
# {position encoding: the number that its proposition bounds by 0}
BOUNDED_NUMBERS = {
    'none': 'repeated/uneven',
    **dict.fromkeys((*formulas.RELATIVE_POSITIONS, 'relative_t5'), 'repeated/relative'),
    'alibi': 'repeated/first',
    'rotary': 'repeated/bound',
}
OPTIONAL_ARRAYS = {'sink_LPCD', 'gate_LPTH'}
SETTING = MetricContext(
    length=T,
    learned_keys=1,
    implicit=False,
    gain=1.0,
    keys=KEYS,
    prefix=0,
    window=None,
    reach=T,
    triggers=False,
    lengths=(4, 9, T),
    thresholds=(0.1, 0.3),
    gated=True,
    period=T // 2,
)


@pytest.fixture(scope='module')
def arrays():
    rng = np.random.default_rng(0)
    attention = rng.random((L, P, H, T, 1 + T)) * np.tri(T, 1 + T, 1)
    attention[..., 2, 2] = 0
    attention[..., 3] *= 9 * (rng.random((L, P, H, 1)) > 0.5)
    attention = attention / attention.sum(-1, keepdims=True)
    shapes = dict(query_LPTHK=(T, H, K), key_LPSHK=(1 + T, H, K), value_LPSHK=(1 + T, H, K), head_LPTHK=(T, H, K))
    shapes |= dict(gate_LPTH=(T, H), normed_LPTD=(T, D), residual_LPTD=(T, D), sink_LPCD=(1, D))
    random_arrays = {name: rng.normal(size=(L, P, *shape)) for name, shape in shapes.items()}
    random_arrays['residual_LPTD'][:, :, 0] *= 40
    random_arrays['residual_LPTD'][1:, :, 5] = random_arrays['residual_LPTD'][1:, :, 0] * 0.5
    return {name: np.float32(array) for name, array in (random_arrays | {'attention_LPHTS': attention}).items()}


@pytest.fixture(scope='module')
def numbers(arrays):
    metrics = registry.select_measurable(arrays)
    return registry.compute_numbers(registry.compute_arrays(arrays, SETTING, metrics), SETTING, metrics)


def iterate_indices(shape):
    return np.ndindex(*shape)


def test_query_norms_match_float64_reference(arrays, numbers):
    norm = np.linalg.norm(np.float64(arrays['query_LPTHK']), axis=-1)
    expected = norm[:, :, 0].mean(), norm[:, :, 1:].mean()
    np.testing.assert_allclose([numbers['norm/query/1'], numbers['norm/query/other']], expected, rtol=1e-5)


def test_key_rank_matches_rank_of_covariance_over_texts(arrays, numbers):
    for name, position in (('1', 0), ('middle', T // 2)):
        ranks = []
        for layer, head in iterate_indices((L, H)):
            eigenvalues = np.linalg.eigvalsh(
                np.cov(np.float64(arrays['key_LPSHK'][layer, :, 1 + position, head]), rowvar=False)
            )
            ranks.append(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())
        np.testing.assert_allclose(numbers[f'key/rank/{name}'], np.mean(ranks), rtol=1e-5)


def test_metric_info_has_label_with_length_and_threshold():
    assert registry.find_metric_info('sink/2/T16@0.25').label == 'Sink_2, T 16 > 0.25'
    assert registry.find_metric_info('sink/1/T16@1e-05').label == 'Sink_1, T 16 > 1e-05'
    assert registry.find_metric_info('alpha/1/T8').label == 'alpha_1, T 8'
    assert registry.find_metric_info('sink/first') is None


def test_effective_rank_of_equal_keys_is_one():
    equal_LPHK = np.random.default_rng(0).normal(size=(1, 1, 2, 64)).astype(np.float32).repeat(50, 1)
    signs = np.random.default_rng(1).choice([-1, 1], equal_LPHK.shape).astype(np.float32)
    for keys in (equal_LPHK, np.nextafter(equal_LPHK, signs * np.inf, dtype=np.float32)):  # equal up to rounding
        np.testing.assert_array_equal(angles.compute_effective_rank(keys), 1)


def test_secondary_sinks_are_counted_between_rise_and_fall_of_norm():
    likeness = np.ones((12, 1, 3))
    assert hidden_states.count_secondary_sinks(likeness[:1], np.ones(1)) == 0.0
    assert hidden_states.count_secondary_sinks(likeness, np.linspace(9, 1, 12)) == 0.0
    assert hidden_states.count_secondary_sinks(likeness, np.array([1.0, *np.linspace(50, 90, 11)])) == 2.0


@pytest.mark.slow
def test_effective_rank_of_collinear_keys_is_one_and_of_isotropic_keys_full():
    rng = np.random.default_rng(0)
    line, ball = rng.normal(size=(2000, 1)) * np.ones(6), rng.normal(size=(2000, 6))
    ranks = angles.compute_effective_rank(np.stack([line, ball], 1)[None])
    np.testing.assert_allclose(ranks[0], [1, 6], atol=0.1)


def test_spike_metrics_match_float64_reference_in_every_block(arrays, numbers):
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
        np.testing.assert_allclose(numbers[f'norm/normed/{layer - 1:02}'], norm[0] / norm[1:].mean(), rtol=1e-5)
        normed = np.abs(np.float64(arrays['normed_LPTD'][layer - 1])).reshape(P, -1)
        np.testing.assert_allclose(
            numbers[f'max_to_mean/{layer - 1:02}'], np.mean(normed.max(1) / normed.mean(1)), 1e-5
        )


def test_massive_activations_exceed_absolute_and_relative_bound():
    residual = np.ones((1, 1, 10, 100), np.float32)
    residual[0, 0, 0, :3] = 99, 101, 1500  # below 100; below 1000 medians; above both
    assert massive_activations.compute_activation_statistics(residual)['massive_LP'].tolist() == [[1.0]]


def test_spectrum_and_mixing_match_float64_reference(arrays, numbers):
    for layer, residual_PTD in enumerate(np.float64(arrays['residual_LPTD']), 1):
        entropies, mean_cosines = [], []
        for h in residual_PTD:
            share = np.linalg.svd(h, compute_uv=False) ** 2
            share /= share.sum()
            entropies.append(-sum(p * np.log(p) for p in share if p > 0))
            unit = h / np.linalg.norm(h, axis=-1, keepdims=True)
            mean_cosines.append(np.mean([unit[s] @ unit[t] for s in range(1, T) for t in range(1, T) if s != t]))
        np.testing.assert_allclose(numbers[f'spectrum/{layer:02}'], np.mean(entropies), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(numbers[f'mixing/{layer:02}'], np.mean(mean_cosines), rtol=1e-4, atol=1e-6)


def test_secondary_sink_matches_first_token_for_more_than_four_blocks():
    layers, first = 9, np.array([1, 1, 50, 50, 50, 50, 50, 50, 1])  # blocks 3 to 8
    likeness = np.zeros((layers, 1, 4))
    likeness[..., 0] = 1
    likeness[2:7, 0, 1] = -0.95  # five blocks
    likeness[2:6, 0, 2] = 0.95  # four blocks
    likeness[[0, 1, 2, 3, 4, 8], 0, 3] = 0.95  # three blocks, and others outside the range
    assert hidden_states.count_secondary_sinks(likeness, first) == 1.0


def test_sink_positions_match_float64_reference(arrays, numbers):
    A = np.float64(arrays['attention_LPHTS'])
    positions, max_alphas = [], []
    for index in iterate_indices((L, P, H)):
        alphas = [A[index][k:, 1 + k].sum() / (T - k) for k in range(T // 2)]
        positions.append(int(np.argmax(alphas)))
        max_alphas.append(max(alphas))
    sink_positions = [position for position, alpha in zip(positions, max_alphas, strict=True) if alpha > 0.3]
    assert 0 < len(sink_positions) < len(positions), 'the draw has heads of both kinds'
    np.testing.assert_allclose(numbers['sink/any'], 100 * len(sink_positions) / len(positions))
    for k in range(KEYS):
        np.testing.assert_allclose(numbers[f'place/{k + 1}'], 100 * sink_positions.count(k) / len(sink_positions))
    np.testing.assert_allclose(
        numbers['place/beyond'], 100 * sum(k >= KEYS for k in sink_positions) / len(sink_positions)
    )


def test_head_metrics_match_float64_reference(arrays, numbers):
    argmax, sparsity, diagonal, induction, ranks, null = ([] for _ in range(6))
    for layer, text, head in iterate_indices((L, P, H)):
        A = np.float64(arrays['attention_LPHTS'][layer, text, head])
        argmax += [A[i, 1:].argmax() == 0 for i in range(1, T)]
        sparsity += [A[i, 1 + j] == 0 for i in range(T) for j in range(i + 1)]
        diagonal.append(A[:, 1:].trace() / T)
        induction.append(np.mean([A[i, 1 + i - T // 2 + 1] for i in range(T // 2, T)]))
        singular = np.linalg.svd(np.float64(arrays['head_LPTHK'][layer, text, :, head]), compute_uv=False)
        ranks.append((singular**2).sum() / singular[0] ** 2)
        null += [A[k:, 1 + k].sum() / (T - k) > 0.3 for k in range(1, T // 2)]
    by_head = np.reshape(induction, (L, P, H)).mean(1)
    expected = dict(first_token_argmax_rate=np.mean(argmax), sparsity=100 * np.mean(sparsity))
    expected |= dict(mean_gate=np.float64(arrays['gate_LPTH']).mean(), diagonal_mass=np.mean(diagonal))
    expected |= {'induction_score': np.mean(induction), 'induction_score/max': by_head.max()}
    expected |= {'stable_rank': np.mean(ranks), 'sink/other': 100 * np.mean(null)}
    assert min(expected.values()) > 0
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_stable_rank_of_zero_and_of_orthogonal_outputs():
    head = np.stack([np.zeros((T, K)), np.eye(T, K)])[None, :, :, None]
    assert heads.compute_stable_rank(head).ravel() == pytest.approx([0, K])


def test_metrics_of_shorter_lengths_match_truncated_attention(arrays, numbers):
    A = np.float64(arrays['attention_LPHTS'])
    for length in SETTING.lengths:
        for k in range(KEYS):
            alphas = [A[index][k:length, 1 + k].sum() / (length - k) for index in iterate_indices((L, P, H))]
            np.testing.assert_allclose(numbers[f'alpha/{k + 1}/T{length}'], np.mean(alphas), rtol=1e-5)
            for threshold in SETTING.thresholds:
                rate = 100 * np.mean([alpha > threshold for alpha in alphas])
                np.testing.assert_allclose(numbers[f'sink/{k + 1}/T{length}@{threshold}'], rate)


def test_sink_norm_ratio_uses_most_attended_token_or_sink_token(arrays):
    received = np.full((L, P, T // 2), 0.1)
    received[:, 0, 2], received[:, 1, 4] = 0.5, 0.6
    norm = np.linalg.norm(np.float64(arrays['residual_LPTD']), axis=-1)
    metric_arrays = dict(received_LPJ=received, norm_LPT=norm)
    expected = [
        np.mean([norm[layer, 0, 2], norm[layer, 1, 4]])
        / np.mean([np.delete(norm[layer, 0], 2).mean(), np.delete(norm[layer, 1], 4).mean()])
        for layer in range(L)
    ]
    np.testing.assert_allclose(sink_position.compute_sink_norm_ratio(metric_arrays), expected)
    metric_arrays |= dict(column_LPC=np.full((L, P, 1), 7.0), received_LPC=np.full((L, P, 1), 0.9))
    np.testing.assert_allclose(sink_position.compute_sink_norm_ratio(metric_arrays), 7 / norm.mean((1, 2)))


def test_sink_norm_ratio_ignores_attention_to_implicit_key(arrays):
    """Use softmax-off-by-one with a sink token, where the implicit key left of it has most of the attention."""
    attention = np.concatenate([np.full((L, P, H, T, 1), 9.0), arrays['attention_LPHTS']], -1)
    context = dataclasses.replace(SETTING, learned_keys=2, implicit=True)
    computed = sink_position.compute_sink_token_arrays(attention, arrays['sink_LPCD'], context)
    expected = arrays['attention_LPHTS'][..., 0] / attention.sum(-1)
    np.testing.assert_allclose(computed['received_LPC'][..., 0], expected.mean((2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ('values', 'expected'),
    [
        ([0, 0, 10, 60, 100], (20, 30)),
        ([0, 80, 10, 60, 100], (20, 30)),  # the sink vanished in between
        ([0, 5, 40, 80], (20, 30)),  # half of the final value is not above half
        ([90, 100], (None, 0)),
        ([0, 0, 5], None),
        ([0, 5, 6], (0, 10)),
        ([30, 5, 30], None),  # as before training
        ([], None),
    ],
)
def test_find_emergence_returns_last_crossing_of_half_final_value(values, expected):
    assert emergence.find_emergence([10 * n for n in range(len(values))], values) == expected


def test_find_first_heads_orders_heads_by_lasting_threshold_crossing():
    alpha = np.zeros((4, 1, 3))
    alpha[1:, 0, 2] = 0.4
    alpha[0, 0, 1], alpha[3, 0, 1] = 0.9, 0.9  # stays above the threshold only from the last step on
    assert emergence.find_first_heads([0, 5, 10, 15], alpha, 0.3) == [(5, 0, 2), (15, 0, 1)]


@pytest.mark.parametrize(
    'spec',
    [
        make_tiny_spec(),
        make_tiny_spec(model__learned_kv__kind='sink_token', model__gate='value'),
        replace_operation(make_tiny_spec(), 'exp', 'plus_one'),
    ],
)
@pytest.mark.slow
def test_captured_model_provides_all_metrics_with_equal_jax_and_numpy_values(spec):
    ids_PT = np.random.default_rng(0).integers(1, 300, (2, 12)).astype(np.int32)
    fields = dict(lengths=(4, 12), thresholds=(0.3,), period=6)
    context = make_context(spec, 12, count_learned_kv(spec.model), **fields)
    captured = jax.jit(lambda params: make_hidden_states_fn(spec, capture=True)(params, ids_PT)[2])(draw_params(spec))
    captured_arrays = extract_arrays(captured, context)
    missing = set() if spec.model.gate == 'value' else OPTIONAL_ARRAYS
    assert missing == OPTIONAL_ARRAYS - {*captured_arrays}
    metrics = registry.select_measurable(captured_arrays)
    all_metrics = {*registry.METRICS, *registry.OFFLINE_METRICS}
    assert all_metrics - {*metrics} == {metric for metric in all_metrics if missing & {*metric.inputs}}
    jax_numbers = registry.compute_numbers(
        jax.jit(lambda captured_arrays: registry.compute_arrays(captured_arrays, context, metrics))(captured_arrays),
        context,
        metrics,
    )
    numpy_arrays = {name: np.asarray(array) for name, array in captured_arrays.items()}
    numpy_numbers = registry.compute_numbers(
        registry.compute_arrays(numpy_arrays, context, metrics), context, metrics
    )
    assert jax_numbers.keys() == numpy_numbers.keys()
    for name, value in numpy_numbers.items():
        np.testing.assert_allclose(jax_numbers[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize('gate', ['headwise', 'shared'])
def test_captured_gate_is_sigmoid_of_the_normed_input(gate):
    spec = make_tiny_spec(model__gate=gate, model__learned_kv__kind='sink_token')
    ids_PT = np.random.default_rng(0).integers(1, 300, (2, 12)).astype(np.int32)
    params = draw_params(spec)
    captured = jax.jit(make_hidden_states_fn(spec, capture=True))(params, ids_PT)[2]
    score = np.einsum('lptd,ldhk->lpthk', captured.normed_BTD, params['blocks']['attention']['gate']['weight_DHK'])
    np.testing.assert_allclose(captured.gate_BTH, (1 / (1 + np.exp(-np.float64(score)))).mean(-1), rtol=1e-4)


def compute_reference_loss(params, ids_T, spec):
    logits_TV = reference.run_forward(params, ids_T[:-1], spec)[0]
    return np.mean([formulas.logsumexp(logits) - logits[i] for logits, i in zip(logits_TV, ids_T[1:], strict=True)])


@pytest.mark.parametrize('kind', ['none', 'sink_token'])
def test_gradient_norms_match_finite_differences(kind, monkeypatch):
    """Differentiate the reference model in float64 by the input of attention of each layer."""
    spec = make_tiny_spec(model__learned_kv__kind=kind)
    ids_T = np.random.default_rng(0).integers(1, 300, 5).astype(np.int32)
    params, sinks, attend = draw_params(spec), int(kind == 'sink_token'), reference.compute_self_attention
    layers, width = spec.model.layers, spec.model.width

    def compute_loss(change_LTD):
        changes = iter(change_LTD)
        monkeypatch.setattr(
            reference, 'compute_self_attention', lambda weights, x, *rest: attend(weights, x + next(changes), *rest)
        )
        return compute_reference_loss(params, ids_T, spec)

    gradient_LTD = np.zeros((layers, sinks + 4, width))
    for index in np.ndindex(gradient_LTD.shape):
        change = np.zeros_like(gradient_LTD)
        change[index] = 1e-4
        gradient_LTD[index] = (compute_loss(change) - compute_loss(-change)) / 2e-4
    with jax.set_mesh(make_one_device_mesh()):
        norm_LPT = run_model.jit_gradient_norms(spec, None)((), params, ids_T[None])['norm_LPT']
    np.testing.assert_allclose(norm_LPT[:, 0], np.linalg.norm(gradient_LTD[:, sinks:], axis=-1), rtol=1e-3)


@pytest.mark.parametrize(('bits', 'tolerance'), [(8, 1e-3), (4, 1e-2)])
def test_quantized_loss_matches_float64_reference(bits, tolerance, monkeypatch):
    spec = make_tiny_spec()
    ids_T = np.random.default_rng(0).integers(1, 300, 13).astype(np.int32)
    params = jax.tree.map(np.float64, draw_params(spec))
    exact_loss = compute_reference_loss(params, ids_T, spec)

    def quantize(x, inputs=None):
        scale = np.abs(x).max(inputs, keepdims=True) / (2 ** (bits - 1) - 1)
        return np.rint(x / scale) * scale

    def attend(weights, x, position_info, spec):
        x = quantize(x)
        heads = [reference.compute_head(h, weights, x, position_info, spec) for h in range(spec.model.heads)]
        output_TK = quantize(np.concatenate([output for _, output in heads], -1))
        return output_TK @ weights['output_HKD'].reshape(-1, spec.model.width), np.stack([A for A, _ in heads])

    def compute_ffn(x, weights, kind):
        x = quantize(x)
        gate = x @ weights['gate_DF']
        return quantize(gate * formulas.sigmoid(gate) * (x @ weights['in_DF'])) @ weights['out_FD']

    assert spec.model.ffn == 'swiglu'
    monkeypatch.setattr(reference, 'compute_self_attention', attend)
    monkeypatch.setattr(formulas, 'compute_ffn', compute_ffn)
    with jax.set_mesh(make_one_device_mesh()):
        program = run_model.jit_token_scores(spec, None, bits)
        loss = float(np.mean(program((), jax.tree.map(np.float32, params), ids_T[None])['loss_LPT']))
    for part in ('attention', 'ffn'):
        for name, weight in params['blocks'][part].items():
            params['blocks'][part][name] = quantize(weight, (1, 2) if name == 'output_HKD' else 1)
    expected = compute_reference_loss(params, ids_T, spec)
    assert abs(loss - expected) < tolerance < abs(exact_loss - expected)


@pytest.mark.slow
def test_measure_gives_requested_numbers_of_a_run(finished_run, capsys):
    options = ['--inputs=induction', '--loss', '--quantize=16,4', '--gradients', '--json']
    assert main(['measure', str(finished_run[0]), *options]) == 0
    numbers = json.loads(capsys.readouterr().out)['inputs']['induction']
    assert numbers['loss/int16'] == pytest.approx(numbers['loss'], rel=1e-3)
    assert numbers['loss/int4'] != numbers['loss']
    assert numbers['gradient_sink_ratio'] > 0
    assert 0 < numbers['induction_score'] <= numbers['induction_score/max'] < 1


@pytest.mark.parametrize('bits', [1, 17])
def test_measure_refuses_other_bits(bits):
    with pytest.raises(UserError, match=str(bits)):
        MeasureRequest(quantize=(8, bits))


@pytest.mark.slow
@pytest.mark.parametrize('position', BOUNDED_NUMBERS)
def test_propositions_hold_only_for_repeated_tokens(position):
    spec = make_tiny_spec(model__position=position)
    for repeated in (True, False):
        ids_PT = np.full((2, 12), 7) if repeated else np.random.default_rng(0).integers(1, 300, (2, 12))
        values = measure_random_model(spec, ids_PT.astype(np.int32), repeated=True)
        spread = max(value for name, value in values.items() if name.startswith('repeated/spread/'))
        assert (spread <= 1e-4) == repeated
        if repeated or position == 'rotary':  # the bound for a repeated token is not tight
            assert values[BOUNDED_NUMBERS[position]] <= 1e-5


def test_proposition_metrics_match_float64_reference(arrays):
    context = dataclasses.replace(SETTING, repeated=True)
    metrics = registry.select_measurable(arrays)
    actual = registry.compute_numbers(registry.compute_arrays(arrays, context, metrics), context, metrics)
    A, query, key = (np.float64(arrays[name]) for name in ('attention_LPHTS', 'query_LPTHK', 'key_LPSHK'))
    uneven, first, bound, relative = [], [], [], []
    for layer, text, head in iterate_indices((L, P, H)):
        share = A[layer, text, head, :, 1:]
        max_norms = (np.linalg.norm(array[layer, text, :, head], axis=-1).max() for array in (query, key[:, :, 1:]))
        x = np.prod([*max_norms]) / np.sqrt(K)
        for t in range(1, T + 1):
            uneven += [abs(share[t - 1, i] - (i < t) / t) for i in range(T)]
            first.append(share[t - 1, 0] - 1 / t)
            weights = [share[T - 1, T - t + i] for i in range(t)]
            relative += [abs(share[t - 1, i] - (weights[i] / sum(weights) if i < t else 0)) for i in range(T)]
            bound += [share[t - 1, i] - np.exp(2 * x) / (np.exp(2 * x) + t - 1) for i in range(T)]
    expected = dict(uneven=max(uneven), first=max(first), bound=max(bound), relative=max(relative))
    for name, value in expected.items():
        np.testing.assert_allclose(actual[f'repeated/{name}'], value, rtol=1e-4, atol=1e-6)


def measure_random_model(spec, ids_PT, **options):
    """Return all metrics of a model with random parameters."""
    context = make_context(spec, ids_PT.shape[1], count_learned_kv(spec.model), **options)
    captured = jax.jit(lambda params: make_hidden_states_fn(spec, capture=True)(params, ids_PT)[2])(draw_params(spec))
    captured_arrays = extract_arrays(captured, context)
    metrics = registry.select_measurable(captured_arrays)
    return registry.compute_numbers(registry.compute_arrays(captured_arrays, context, metrics), context, metrics)
