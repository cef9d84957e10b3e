"""The hook against the reference model: every number from matrices that NumPy computed."""

import jax
import numpy as np
import pytest
import reference
from conftest import OPERATIONS, operation, tiny

from sinklab import sharding
from sinklab.spec import Hardware
from sinklab.train import probe, state, step

IDS_PT = np.random.default_rng(0).integers(0, 300, (5, 12)).astype(np.int32)


def sharpened(spec, mesh):
    """Parameters whose attention is far from uniform, so that there are sinks to count."""
    params = state.create(spec, mesh)['params']
    attention = params['blocks']['attention']
    for name in ('query_DHK', 'key_DHK'):
        attention[name] = 4 * attention[name]
    return params


@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
@pytest.mark.parametrize('hardware', [Hardware(), Hardware(data=2, tensor=2)], ids=str)
def test_the_hook_says_what_numpy_says(similarity, normalizer, hardware):
    spec = operation(tiny(), similarity, normalizer)
    mesh = sharding.mesh(hardware)
    with jax.set_mesh(mesh):
        params = sharpened(spec, mesh)
        observed = jax.device_get(probe.observer(spec, mesh)(params, step.put(IDS_PT, mesh)))
    found = probe.numbers(observed)

    alpha, mass, norm, attention = [], [], [], []
    for tokens in IDS_PT:
        _, A_LHTT, residual_LTD = reference.forward(jax.device_get(params), tokens, spec.model)
        rows = A_LHTT.sum(-1)
        P = A_LHTT / (rows[..., None] + 1e-8)  # the proxy as the paper's code defines it
        alpha.append([P[..., k:, k].mean(-1) for k in range(3)])
        mass.append(rows.mean(-1))
        norm.append(np.linalg.norm(residual_LTD, axis=-1))
        attention.append(A_LHTT)
    alpha_PKLH, norm_LPT = np.array(alpha), np.moveaxis(norm, 0, 1)
    np.testing.assert_allclose(observed['alpha_LPHK'], np.transpose(alpha_PKLH, (2, 0, 3, 1)), atol=1e-4)
    np.testing.assert_allclose(observed['attention_LHTS'], attention[0], atol=1e-4)
    assert found['mass/row'] == pytest.approx(np.mean(mass), rel=1e-4)
    assert found['alpha/floor'] == pytest.approx(sum(1 / k for k in range(1, 13)) / 12)
    for k in range(3):
        assert found[f'sink/{k + 1}'] == pytest.approx(100 * (alpha_PKLH[:, k] > 0.3).mean())
        assert found[f'alpha/{k + 1}'] == pytest.approx(alpha_PKLH[:, k].mean(), rel=1e-3)
    assert found['sink/1@0.2'] == pytest.approx(100 * (alpha_PKLH[:, 0] > 0.2).mean())
    assert found['sink/1@0.2'] > found['sink/1@0.5'] > 0, 'nothing to count: sharpen the scores'
    for layer in range(2):
        ratio = norm_LPT[layer, :, 0].mean() / norm_LPT[layer, :, 1:].mean()
        assert found[f'norm/ratio/{layer + 1:02}'] == pytest.approx(ratio, rel=1e-4)


def test_what_is_saved_is_what_was_seen(tmp_path):
    rng = np.random.default_rng(0)
    shapes = dict(alpha_LPHK=(2, 5, 4, 3), mass_LPH=(2, 5, 4), norm_LPT=(2, 5, 12), attention_LHTS=(2, 4, 12, 12))
    observed = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    probe.save(tmp_path / '1.npz', observed)
    assert [path.name for path in tmp_path.iterdir()] == ['1.npz']
    with np.load(tmp_path / '1.npz') as saved:
        np.testing.assert_array_equal(saved['alpha_LPHK'], observed['alpha_LPHK'])
        np.testing.assert_allclose(saved['mass_LH'], observed['mass_LPH'].mean(1))
        np.testing.assert_allclose(saved['attention_LHTS'], observed['attention_LHTS'], atol=1e-3)


def test_the_memory_of_a_capture_is_counted_before_it_is_taken():
    spec = tiny()
    attention, residual = 2 * 5 * 4 * 12 * 12 * 4, 2 * 5 * 12 * 16 * 4
    assert probe.capture_bytes(spec) == attention + residual
