"""Tests of the sink probe against a NumPy reference model and metrics computed by loops."""

import dataclasses
from types import SimpleNamespace

import formulas
import jax
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_specs import draw_params, make_tiny_spec, replace_operation

from sinklab.config.spec import Layout
from sinklab.metrics import registry
from sinklab.metrics.metric import Metric, extract_arrays, make_context
from sinklab.parallel import device_mesh
from sinklab.train import sink_probe, state
from sinklab.train.step import make_hidden_states_fn

IDS_PT = np.random.default_rng(0).integers(1, 300, (5, 12)).astype(np.int32)
IDS_BT = np.random.default_rng(1).integers(1, 300, (4, 16)).astype(np.int32)
LENGTH, KEYS = 12, 3  # of tiny_specs.TINY_FIELDS


def compute_matrix_metrics(A, columns, mask):
    """Compute (means, importances) of one matrix of T queries over its columns and T keys, as in the paper's code."""
    A = np.float64(A)
    P = np.array([np.abs(row) / (np.abs(row).sum() + 1e-8) for row in A])
    rows = range(LENGTH)

    def compute_alpha(matrix, k):
        num_queries = LENGTH if k <= (mask.prefix or 1) else LENGTH - k + 1
        return sum(matrix[i, columns + k - 1] for i in rows) / num_queries

    means = {
        'mass/row': np.mean([np.abs(A[i]).sum() for i in rows]),
        'entropy/row': np.mean([-sum(p * np.log(p) for p in P[i] if p > 0) for i in rows]),
        'first_token_argmax_rate': np.mean([max(P[i, columns + 1 :]) < P[i, columns] for i in rows[1:]]),
        'sparsity': 100 * np.mean([A[i, columns + j] == 0 for i in rows for j in range(i + 1)]),
    }
    importances = {'1/raw': compute_alpha(A, 1), **{str(k): compute_alpha(P, k) for k in range(1, KEYS + 1)}}
    if columns:
        strongest = max(sum(P[i, column] for i in rows) for column in range(columns))
        importances |= {'star': (1 + strongest) / (LENGTH + 1), 'star/clean': strongest / LENGTH}
    if reach := min(filter(None, [mask.window, mask.block]), default=None):
        importances['1/window'] = sum(P[i, columns] for i in range(reach)) / reach
    if mask.window:
        late_queries = range(mask.window + 1, LENGTH + 1)  # queries, from 1
        importances['edge'] = sum(P[t - 1, columns + (t - mask.window + 1) - 1] for t in late_queries) / len(
            late_queries
        )
    return means, importances


def compute_expected_metrics(attention_LPHTS, spec, columns):
    """Compute the metrics of a probe, by name."""
    prefix = spec.model.mask.prefix
    matrices = np.reshape(attention_LPHTS, (-1, *np.shape(attention_LPHTS)[-2:]))
    means, importances = zip(*(compute_matrix_metrics(A, columns, spec.model.mask) for A in matrices), strict=True)
    alphas = {name: np.array([entry[name] for entry in importances]) for name in importances[0]}

    def compute_rate(alpha, threshold=0.3):
        return 100 * np.mean([entry > threshold for entry in alpha])

    mask = spec.model.mask
    reach = min(filter(None, [mask.window, mask.block]), default=LENGTH)
    floor = sum(1 / (max(t, prefix or 1) + columns) for t in range(1, LENGTH + 1) if t <= reach) / LENGTH
    metrics = {'alpha/floor': floor} | {name: np.mean([entry[name] for entry in means]) for name in means[0]}
    for name, alpha in alphas.items():
        metrics |= {f'sink/{name}': compute_rate(alpha), f'alpha/{name}': alpha.mean()}
    metrics |= {f'sink/1@{threshold}': compute_rate(alphas['1'], threshold) for threshold in (0.2, 0.4, 0.5)}
    if prefix:
        prefix_alphas = [alphas[str(k)] for k in range(1, prefix + 1)]
        strongest = [max(range(prefix), key=lambda k: prefix_alphas[k][i]) for i in range(len(matrices))]
        metrics['sink/prefix'] = compute_rate(np.max(prefix_alphas, 0))
        metrics |= {f'argmax/{k + 1}': 100 * strongest.count(k) / len(matrices) for k in range(prefix)}
    return metrics


def compute_expected_norms(captured, columns):
    """Compute norms of keys and values, query-key metrics, and the share of the first token in head outputs."""
    norms = formulas.compute_qk_metrics(captured.query_BTHK, captured.key_BSHK[:, :, columns:])
    inputs = captured.attention_BHTS, captured.key_BSHK, captured.value_BSHK, captured.head_BTHK
    arrays = [np.float64(array) for array in inputs]
    for name, array in (('key', arrays[1]), ('value', arrays[2])):
        norm = np.sqrt((array[:, :, columns:] ** 2).sum(-1))
        first, other = norm[:, :, 0].mean(), norm[:, :, 1:].mean()
        norms |= {f'norm/{name}/1': first, f'norm/{name}/other': other, f'norm/{name}/ratio': first / other}
    shares = []
    for layer, sequence, h, query in np.ndindex(arrays[0].shape[:4]):
        if query > 0:
            part = arrays[0][layer, sequence, h, query, columns] * arrays[2][layer, sequence, columns, h]
            total_norm = np.linalg.norm(arrays[3][layer, sequence, query, h])
            shares.append(np.linalg.norm(part) / total_norm if total_norm else 0.0)
    return norms | {'contribution/1': np.mean(shares)}


CASES = {
    'softmax': make_tiny_spec(),
    'sigmoid': replace_operation(make_tiny_spec(), 'sigmoid', 'none'),
    'linear, kv': replace_operation(make_tiny_spec(model__learned_kv__kind='kv'), 'identity', 'none'),
    'window, k': make_tiny_spec(model__mask__window=6, model__learned_kv__kind='k', model__learned_kv__value='zero'),
    'prefix, logit': make_tiny_spec(model__mask__prefix=2, model__learned_kv__kind='logit'),
    'sink token': make_tiny_spec(model__learned_kv__kind='sink_token'),
}


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('layout', [Layout(), pytest.param(Layout(data=2, tensor=2), marks=pytest.mark.slow)])
def test_probe_metrics_match_numpy_reference(name, layout):
    spec, columns = CASES[name], int(CASES[name].model.learned_kv.kind != 'none')
    params, mesh = draw_params(spec), device_mesh.make_mesh(layout)
    with jax.set_mesh(mesh):
        device_params = jax.device_put(params, state.get_state_shardings(spec, mesh)['params'])
        observations = sink_probe.make_probe(spec, mesh)(device_params, IDS_PT)
    metrics = sink_probe.compute_probe_metrics(observations, spec)

    outputs = [reference.run_forward(params, tokens, spec) for tokens in IDS_PT]
    attention_LPHTS, residual_LPTD = (np.stack([output[index] for output in outputs], 1) for index in (1, 2))
    assert attention_LPHTS.shape[-1] == LENGTH + columns
    expected = compute_expected_metrics(attention_LPHTS, spec, columns)
    norm_LPT = np.linalg.norm(residual_LPTD, axis=-1)
    for layer, norm_PT in enumerate(norm_LPT, 1):
        expected[f'norm/ratio/{layer:02}'] = norm_PT[:, 0].mean() / norm_PT[:, 1:].mean()
    _, _, captured = jax.device_get(
        jax.jit(make_hidden_states_fn(spec, capture=True))(params, IDS_PT)
    )  # of one device
    assert metrics == pytest.approx(expected | compute_expected_norms(captured, columns), rel=1e-3, abs=1e-5)
    share_LPHTS = np.abs(attention_LPHTS) / np.abs(attention_LPHTS).sum(-1, keepdims=True)
    np.testing.assert_allclose(observations['norm_LPT'], norm_LPT, rtol=1e-3)
    np.testing.assert_allclose(observations['attention_LHTS'], share_LPHTS[:, 0], atol=1e-3)
    assert 0 < metrics['sink/1'] < 100, 'no sink or only sinks'


OFF_BY_ONE = dict(model__attention__normalizer='plus_one')
COLUMN_OF_ZERO = dict(model__learned_kv__kind='k', model__learned_kv__value='zero')


@pytest.mark.slow
def test_softmax_off_by_one_and_zero_k_bias_have_equal_metrics():
    """Test metrics of the probe and of a training batch; the gain cancels in normalized attention."""
    metrics, params = [], draw_params(make_tiny_spec(**OFF_BY_ONE, model__layers=1))
    params_with_column = jax.tree.map(np.asarray, params)
    params_with_column['blocks']['attention']['learned_kv'] = dict(key_HK=np.zeros((1, 4, 4), np.float32))
    for changes, weights in ((OFF_BY_ONE, params), (COLUMN_OF_ZERO, params_with_column)):
        spec = make_tiny_spec(**changes, model__layers=1, model__attention__gain=0.5)
        mesh = device_mesh.make_mesh(Layout())
        with jax.set_mesh(mesh), jax.disable_jit():
            observations = jax.device_get(sink_probe.make_probe(spec, mesh)(weights, IDS_PT))
            context = make_context(spec, IDS_BT.shape[1], int(changes is COLUMN_OF_ZERO))
            _, _, captured = make_hidden_states_fn(spec, num_first_keys=3)(weights, IDS_BT)
        context = {name: float(value) for name, value in registry.compute_batch_metrics(captured, context).items()}
        metrics.append(sink_probe.compute_probe_metrics(observations, spec) | context)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)
    assert metrics[0]['alpha/star/clean'] > 0.05
    assert {'sink/1', 'sink/1/context', 'alpha/star/clean/context', 'mass/row/context'} <= set(metrics[0])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2),
    st.sampled_from([None, 2, 3]),
    st.sampled_from([None, 2, 5, 11]),
    st.sampled_from([None, 4]),
    st.integers(0, 99),
)
def test_metrics_of_random_matrices_match_loops(columns, prefix, window, block, seed):
    spec = make_tiny_spec(model__mask__prefix=prefix, model__mask__window=window, model__mask__block=block)
    captured, context = make_random_capture(columns, seed), make_context(spec, LENGTH, columns)
    metrics = registry.compute_numbers(jax.device_get(registry.compute_probe_arrays(captured, context)), context)
    expected = compute_expected_metrics(captured.attention_BHTS, spec, columns) | compute_expected_norms(
        captured, columns
    )
    metrics = {name: value for name, value in metrics.items() if not name.startswith('norm/ratio')}
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


def make_random_capture(columns, seed=0):
    """Make a capture of two layers, three sequences and two heads; one head is zero at its second query."""
    draw = np.random.default_rng(seed).normal
    keys = LENGTH + columns
    head_LPTHK = draw(size=(2, 3, LENGTH, 2, 4))
    head_LPTHK[0, 0, 1, 0] = 0
    attention_LPHTS = draw(size=(2, 3, 2, LENGTH, keys)) ** 5
    attention_LPHTS[0, 0, 0, 1] = 0
    return SimpleNamespace(
        attention_BHTS=np.float32(attention_LPHTS),
        query_BTHK=np.float32(draw(size=(2, 3, LENGTH, 2, 4))),
        key_BSHK=np.float32(draw(size=(2, 3, keys, 2, 4))),
        value_BSHK=np.float32(draw(size=(2, 3, keys, 2, 4))),
        head_BTHK=np.float32(head_LPTHK),
        residual_BTD=np.float32(draw(size=(2, 3, LENGTH, 8))),
        gate_BTH=np.float32(draw(size=(2, 3, LENGTH, 2))),
    )


def test_window_as_long_as_probe_adds_no_window_metrics():
    arrays = registry.compute_probe_arrays(
        make_random_capture(0), make_context(make_tiny_spec(model__mask__window=12), LENGTH, 0)
    )
    assert not {'within_LPH', 'edge_LPH'} & set(arrays)


def test_implicit_column_has_missing_row_mass_and_zero_key_and_value():
    captured, spec = (
        make_random_capture(0),
        make_tiny_spec(model__attention__normalizer='plus_one', model__attention__gain=0.5),
    )
    context = make_context(spec, LENGTH, 0)
    arrays = extract_arrays(captured, context)
    assert context.learned_keys == 1
    missing_mass = np.maximum(0.5 - captured.attention_BHTS.sum(-1), 0)
    np.testing.assert_allclose(arrays['attention_LPHTS'][..., 0], missing_mass, rtol=1e-5)
    np.testing.assert_array_equal(arrays['attention_LPHTS'][..., 1:], captured.attention_BHTS)
    for name in ('key', 'value'):
        assert not arrays[f'{name}_LPSHK'][:, :, 0].any()
        np.testing.assert_array_equal(arrays[f'{name}_LPSHK'][:, :, 1:], getattr(captured, f'{name}_BSHK'))


@pytest.mark.slow
@pytest.mark.parametrize('columns', ['none', 'sink_token', 'kv', 'logit', 'v'])
def test_capture_has_queries_keys_values_and_head_outputs_of_attention(columns):
    """Test the first layer, whose input is known; a V bias is added later."""
    spec = make_tiny_spec(model__learned_kv__kind=columns, model__combination='add_wide', model__layers=1)
    params = draw_params(spec)
    with jax.disable_jit():
        _, _, captured = make_hidden_states_fn(spec, capture=True)(params, IDS_PT)
    token_BTD, has_sink_token = np.float64(params['embedding_VD'])[IDS_PT], columns == 'sink_token'
    if has_sink_token:
        token_BTD = np.concatenate([np.broadcast_to(params['sink']['vector_TD'], (len(IDS_PT), 1, 16)), token_BTD], 1)
    weights = jax.tree.map(lambda leaf: np.float64(leaf[0]), params['blocks'])
    gain_D, attention_weights = weights['attention_norms']['before']['gain_D'], weights['attention']
    x_BTD = formulas.rms_norm(token_BTD, gain_D, spec.model.norm_epsilon)
    for sequence, h in np.ndindex(len(IDS_PT), 4):
        x_TD = x_BTD[sequence]
        query_TK, key_SK = (
            formulas.rotate(x_TD @ attention_weights[name][:, h], np.arange(len(x_TD)), spec.model.rotary)
            for name in ('query_DHK', 'key_DHK')
        )
        np.testing.assert_allclose(captured.query_BTHK[0, sequence, :, h], query_TK[int(has_sink_token) :], atol=1e-4)
        value_SK = x_TD @ attention_weights['value_DHK'][:, h]
        if columns == 'kv':
            key_SK = np.vstack([attention_weights['learned_kv']['key_HK'][h], key_SK])
            value_SK = np.vstack([attention_weights['learned_kv']['value_HK'][h], value_SK])
        if columns == 'logit':
            key_SK, value_SK = (np.vstack([np.zeros(array.shape[-1]), array]) for array in (key_SK, value_SK))
        np.testing.assert_allclose(captured.key_BSHK[0, sequence, :, h], key_SK, atol=1e-4)
        np.testing.assert_allclose(captured.value_BSHK[0, sequence, :, h], value_SK, atol=1e-4)
        head_TK = np.float64(captured.attention_BHTS[0, sequence, h]) @ value_SK
        np.testing.assert_allclose(captured.head_BTHK[0, sequence, :, h], head_TK, atol=1e-4)


@pytest.mark.parametrize('columns', [0, 1])
def test_save_probe_writes_arrays_of_metrics(tmp_path, columns):
    context = make_context(make_tiny_spec(), LENGTH, columns)
    arrays = jax.device_get(registry.compute_probe_arrays(make_random_capture(columns), context))
    sink_probe.save_probe(tmp_path / '1.npz', arrays, context)
    assert [path.name for path in tmp_path.iterdir()] == ['1.npz']
    with np.load(tmp_path / '1.npz') as file:
        np.testing.assert_array_equal(file['alpha_LPHJ'], arrays['alpha_LPHJ'])
        np.testing.assert_array_equal(file['attention_LHTS'], arrays['attention_LHTS'])
        assert file['attention_LHTS'].dtype == np.float16
        names = {name for metric in registry.METRICS if metric.is_applicable(context) for name in metric.saved_arrays}
        assert set(file) == names
        assert {'mass_LH', 'raw_LH', 'entropy_LH', 'contribution_LH', 'norm_LT', 'key_LT', 'value_LT'} < names
        assert {'cos_LH2', 'norms_LH2', 'score_LH2'} < names
        assert ('star_LH' in names) == bool(columns)
        for name in names - set(arrays):
            np.testing.assert_allclose(file[name], arrays[name.replace('_L', '_LP')].mean(1), rtol=1e-6)


def test_metric_infos_cover_exactly_probe_metrics():
    names, trigger_PT = set(), np.random.default_rng(0).random((3, LENGTH)) < 0.4
    for spec, columns in (
        (make_tiny_spec(model__mask__prefix=2, model__mask__window=4, model__gate='headwise'), 1),
        (dataclasses.replace(make_tiny_spec(), data=dataclasses.replace(make_tiny_spec().data, task='backcopy')), 0),
    ):
        context = make_context(spec, LENGTH, columns)
        arrays = registry.compute_probe_arrays(make_random_capture(columns), context)
        names |= set(registry.compute_numbers(dict(arrays, trigger_PT=trigger_PT), context))
    entries = {name: registry.find_metric_info(name) for name in names}
    assert all(entries.values()), [name for name, entry in entries.items() if entry is None]
    assert {entry.description for entry in entries.values()} == {info.description for info in registry.METRIC_INFOS}
    labels = [entry.label for entry in entries.values()]
    assert len(set(labels)) == len(labels)


def test_figures_use_arrays_saved_by_every_probe():
    assert all(
        metric.is_applicable is Metric.is_applicable and metric.figure.array_name in metric.saved_arrays
        for metric in list_drawn_metrics()
    )


def list_drawn_metrics():
    return [metric for metric in registry.METRICS if metric.figure]


@pytest.mark.parametrize('columns', ['none', 'kv'])
def test_estimate_probe_bytes_equals_size_of_captured_arrays(columns):
    keys = 12 + (columns == 'kv')
    attention, residual = 2 * 5 * 4 * 12 * keys * 4, 2 * 5 * 12 * 16 * 4
    query, key = 2 * 5 * 4 * 12 * 4 * 4, 2 * 5 * 4 * keys * 4 * 4
    value, head = 2 * 5 * 4 * keys * 16 * 4, 2 * 5 * 4 * 12 * 16 * 4
    spec = make_tiny_spec(model__learned_kv__kind=columns, model__combination='add_wide')
    assert sink_probe.estimate_probe_bytes(spec) == attention + residual + query + key + value + head
