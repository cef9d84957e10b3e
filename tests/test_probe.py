"""The hook against the reference model: every number, from matrices that NumPy computed and loops that read them."""

import jax
import numpy as np
import pytest
import reference
from conftest import drawn, operation, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab import sharding
from sinklab.spec import Hardware
from sinklab.train import probe, state, step
from sinklab.train.forward import forward

IDS_PT = np.random.default_rng(0).integers(1, 300, (5, 12)).astype(np.int32)
IDS_BT = np.random.default_rng(1).integers(1, 300, (4, 16)).astype(np.int32)
LENGTH, KEYS = 12, 3  # of conftest.TINY


def summed_by_hand(A, columns, mask):
    """What the paper's code takes from one matrix of T queries over its columns and T keys."""
    A = np.float64(A)
    P = np.array([np.abs(row) / (np.abs(row).sum() + 1e-8) for row in A])
    rows = range(LENGTH)

    def alpha(matrix, k):
        may = LENGTH if k <= (mask.prefix or 1) else LENGTH - k + 1
        return sum(matrix[i, columns + k - 1] for i in rows) / may

    found = {'mass': np.mean([np.abs(A[i]).sum() for i in rows]), 'raw': alpha(A, 1)}
    found |= {str(k): alpha(P, k) for k in range(1, KEYS + 1)}
    if columns:
        strongest = max(sum(P[i, column] for i in rows) for column in range(columns))
        found |= {'star': (1 + strongest) / (LENGTH + 1), 'star/clean': strongest / LENGTH}
    if reach := min(filter(None, [mask.window, mask.block]), default=None):
        found['1/window'] = sum(P[i, columns] for i in range(reach)) / reach
    if mask.window:
        late = range(mask.window + 1, LENGTH + 1)  # queries, from 1
        found['edge'] = sum(P[t - 1, columns + (t - mask.window + 1) - 1] for t in late) / len(late)
    return found


def expected_numbers(attention_LPHTS, spec, columns):
    """metrics.jsonl of a probe, by name."""
    prefix = spec.model.mask.prefix
    matrices = np.reshape(attention_LPHTS, (-1, *np.shape(attention_LPHTS)[-2:]))
    read = [summed_by_hand(A, columns, spec.model.mask) for A in matrices]
    found = {name: np.array([one[name] for one in read]) for name in read[0]}
    rate = lambda alpha, threshold=0.3: 100 * np.mean([one > threshold for one in alpha])  # noqa: E731
    mask = spec.model.mask
    reach = min(filter(None, [mask.window, mask.block]), default=LENGTH)
    floor = sum(1 / (max(t, prefix or 1) + columns) for t in range(1, LENGTH + 1) if t <= reach) / LENGTH
    numbers = {'mass/row': found.pop('mass').mean(), 'alpha/floor': floor}
    found['1/raw'] = found.pop('raw')
    for name, alpha in found.items():
        numbers |= {f'sink/{name}': rate(alpha), f'alpha/{name}': alpha.mean()}
    numbers |= {f'sink/1@{threshold}': rate(found['1'], threshold) for threshold in (0.2, 0.4, 0.5)}
    if prefix:
        within = [found[str(k)] for k in range(1, prefix + 1)]
        strongest = [max(range(prefix), key=lambda k: within[k][i]) for i in range(len(read))]
        numbers['sink/prefix'] = rate(np.max(within, 0))
        numbers |= {f'argmax/{k + 1}': 100 * strongest.count(k) / len(read) for k in range(prefix)}
    return numbers


CASES = {
    'softmax': tiny(),
    'sigmoid': operation(tiny(), 'sigmoid', 'none'),
    'linear, kv': operation(tiny(model__columns__kind='kv'), 'identity', 'none'),
    'window, k': tiny(model__mask__window=4, model__columns__kind='k', model__columns__value='zero'),
    'prefix, logit': tiny(model__mask__prefix=2, model__columns__kind='logit'),
    'sink token': tiny(model__columns__kind='sink_token'),
}


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('hardware', [Hardware(), pytest.param(Hardware(data=2, tensor=2), marks=pytest.mark.slow)])
def test_the_hook_says_what_numpy_says(name, hardware):
    spec, columns = CASES[name], int(CASES[name].model.columns.kind != 'none')
    params, mesh = drawn(spec), sharding.mesh(hardware)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, state.shardings(spec, mesh)['params'])
        observed = probe.observer(spec, mesh)(placed, IDS_PT)
    found = probe.numbers(observed, spec)

    each = [reference.forward(params, tokens, spec) for tokens in IDS_PT]
    attention_LPHTS, residual_LPTD = (np.stack([one[at] for one in each], 1) for at in (1, 2))
    assert attention_LPHTS.shape[-1] == LENGTH + columns
    expected = expected_numbers(attention_LPHTS, spec, columns)
    norm_LPT = np.linalg.norm(residual_LPTD, axis=-1)
    for layer, norm_PT in enumerate(norm_LPT, 1):
        expected[f'norm/ratio/{layer:02}'] = norm_PT[:, 0].mean() / norm_PT[:, 1:].mean()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    share_LPHTS = np.abs(attention_LPHTS) / np.abs(attention_LPHTS).sum(-1, keepdims=True)
    np.testing.assert_allclose(observed['norm_LPT'], norm_LPT, rtol=1e-3)
    np.testing.assert_allclose(observed['attention_LHTS'], share_LPHTS[:, 0], atol=1e-3)
    np.testing.assert_allclose(observed['first_LPHT'], share_LPHTS[..., columns], atol=1e-3)
    assert 0 < found['sink/1'] < 100, 'nothing to count'


OFF_BY_ONE = dict(model__attention__normalizer='plus_one')
COLUMN_OF_ZERO = dict(model__columns__kind='k', model__columns__value='zero')


@pytest.mark.slow
def test_softmax_off_by_one_and_a_column_of_zero_are_one_model_with_one_set_of_numbers():
    """In the probe, and over the context of a training batch; the gain is one that a proxy takes out again."""
    found, params = [], drawn(tiny(**OFF_BY_ONE, model__layers=1))
    with_column = jax.tree.map(np.asarray, params)
    with_column['blocks']['attention']['columns'] = dict(key_HK=np.zeros((1, 4, 4), np.float32))
    for changes, weights in ((OFF_BY_ONE, params), (COLUMN_OF_ZERO, with_column)):
        spec = tiny(**changes, model__layers=1, model__attention__gain=0.5)
        mesh = sharding.mesh(Hardware())
        with jax.set_mesh(mesh), jax.disable_jit():
            observed = jax.device_get(probe.observer(spec, mesh)(weights, IDS_PT))
            _, _, captured = forward(spec, keys=3)(weights, IDS_BT)
        context = {name: float(value) for name, value in step.sinks(captured, spec).items()}
        found.append(probe.numbers(observed, spec) | context)
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)
    assert found[0]['alpha/star/clean'] > 0.05
    assert {'sink/1', 'sink/1/context', 'alpha/star/clean/context', 'mass/row/context'} <= set(found[0])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2),
    st.sampled_from([None, 2, 3]),
    st.sampled_from([None, 2, 5, 11]),
    st.sampled_from([None, 4]),
    st.integers(0, 99),
)
def test_numbers_of_any_matrices_are_those_of_the_loops(columns, prefix, window, block, seed):
    spec = tiny(model__mask__prefix=prefix, model__mask__window=window, model__mask__block=block)
    attention_LPHTS = np.random.default_rng(seed).normal(size=(2, 3, 2, LENGTH, LENGTH + columns)) ** 5
    observed = jax.device_get(probe.observed(attention_LPHTS.astype(np.float32), columns, spec))
    expected = expected_numbers(attention_LPHTS, spec, columns)
    found = probe.numbers(observed | dict(norm_LPT=np.ones((2, 3, LENGTH))), spec)
    found = {name: value for name, value in found.items() if not name.startswith('norm/')}
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_window_as_long_as_the_probe_is_none():
    spec = tiny(model__mask__window=12)
    observed = probe.observed(np.ones((1, 1, 1, LENGTH, LENGTH), np.float32), 0, spec)
    assert not {'within_LPH', 'edge_LPH'} & set(observed)


@pytest.mark.parametrize('columns', [0, 1])
def test_what_is_saved_is_what_was_seen(tmp_path, columns):
    rng = np.random.default_rng(0)
    shapes = dict(alpha_LPHK=(2, 5, 4, 3), mass_LPH=(2, 5, 4), norm_LPT=(2, 5, 12), attention_LHTS=(2, 4, 12, 13))
    shapes |= dict(star_LPHC=(2, 5, 4, columns)) if columns else {}
    observed = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    probe.save(tmp_path / '1.npz', observed)
    assert [path.name for path in tmp_path.iterdir()] == ['1.npz']
    with np.load(tmp_path / '1.npz') as saved:
        np.testing.assert_array_equal(saved['alpha_LPHK'], observed['alpha_LPHK'])
        np.testing.assert_allclose(saved['mass_LH'], observed['mass_LPH'].mean(1))
        np.testing.assert_allclose(saved['attention_LHTS'], observed['attention_LHTS'], atol=1e-3)
        if columns:
            np.testing.assert_allclose(saved['star_LH'], observed['star_LPHC'][..., 0].mean(1))
        else:
            assert 'star_LH' not in saved


@pytest.mark.parametrize('columns', ['none', 'kv'])
def test_the_memory_of_a_capture_is_counted_before_it_is_taken(columns):
    keys = 12 + (columns == 'kv')
    attention, residual = 2 * 5 * 4 * 12 * keys * 4, 2 * 5 * 12 * 16 * 4
    assert probe.capture_bytes(tiny(model__columns__kind=columns)) == attention + residual
