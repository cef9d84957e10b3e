import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.fft
from flax import nnx
from optax import contrib
from tiny_specs import make_tiny_spec

from sinklab.train import state
from sinklab.train.optimizer import make_muon_dimension_numbers, make_optimizer, make_schedule


def compute_rates(**changes):
    optimizer = make_tiny_spec(**{f'optimizer__{name}': value for name, value in changes.items()}).optimizer
    return np.array([make_schedule(optimizer)(step) for step in range(optimizer.steps + 1)])


def test_constant_schedule_warms_up_from_zero_and_stays():
    actual = compute_rates(steps=20, warmup_steps=4, peak_learning_rate=0.8)
    np.testing.assert_allclose(actual, np.minimum(0.2 * np.arange(21), 0.8), rtol=1e-6)


def test_cosine_schedule_warms_up_and_decays_to_final_share():
    actual = compute_rates(steps=20, warmup_steps=4, peak_learning_rate=0.8, schedule='cosine', final_share=0.125)
    angle = np.pi * (np.arange(21) - 4) / 16
    decay = 0.1 + 0.7 * (1 + np.cos(angle)) / 2
    np.testing.assert_allclose(actual, np.where(np.arange(21) < 4, 0.2 * np.arange(21), decay), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['adamw', 'orthoadam'])
def test_adamw_clips_gradients_and_decays_every_parameter(name):
    spec = make_tiny_spec(
        optimizer__name=name, optimizer__warmup_steps=0, optimizer__weight_decay=0.5, optimizer__clip_norm=1.0
    ).optimizer
    optimizer = make_optimizer(spec, dict(gain=None, weight=contrib.MuonDimensionNumbers((1,), (2,))))
    params = {'gain': jnp.array([1.0, -2.0]), 'weight': jnp.arange(12.0).reshape(2, 3, 2)}
    gradients = [
        {'gain': jnp.array([3.0, 0.0]), 'weight': params['weight'] - 5},
        {'gain': jnp.array([0.1, 0.2]), 'weight': params['weight'] / 10},
    ]
    bases = {
        key: np.eye(leaf.size) if name == 'adamw' else make_basis(key, leaf.shape) for key, leaf in params.items()
    }
    state, expected = optimizer.init(params), {name: np.float64(value) for name, value in params.items()}
    first_moment, second_moment = (dict.fromkeys(params, 0.0) for _ in range(2))
    for step, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in gradient.values()))
        for name in expected:
            g = bases[name] @ np.float64(gradient[name]).ravel() / max(norm, 1.0)
            first_moment[name] = 0.9 * first_moment[name] + 0.1 * g
            second_moment[name] = 0.95 * second_moment[name] + 0.05 * g**2
            direction = (
                first_moment[name] / (1 - 0.9**step) / (np.sqrt(second_moment[name] / (1 - 0.95**step)) + 1e-8)
            )
            direction = (bases[name].T @ direction).reshape(expected[name].shape)
            expected[name] = expected[name] - 1e-2 * (direction + 0.5 * expected[name])
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)


def make_basis(name, shape):
    """Make the basis of a parameter, whose signs depend on its index, as a matrix of all its entries."""
    sign = jax.random.rademacher(jax.random.key(['gain', 'weight'].index(name)), shape)
    factors = [scipy.fft.dct(np.eye(size), axis=0, norm='ortho') for size in shape[-2:]]
    if name == 'weight':  # the first axis is that of layers
        factors.insert(0, np.eye(shape[0]))
    basis = functools.reduce(np.kron, factors) * np.ravel(sign)
    np.testing.assert_allclose(basis @ basis.T, np.eye(sign.size), atol=1e-12)
    return basis


@pytest.mark.slow
def test_sgd_adds_momentum_and_weight_decay_to_gradient():
    spec = make_tiny_spec(
        **SGD, optimizer__warmup_steps=0, optimizer__weight_decay=0.5, optimizer__clip_norm=1e9
    ).optimizer
    optimizer = make_optimizer(spec, {})
    params, trace, expected = jnp.array([1.0, -2.0]), np.zeros(2), np.array([1.0, -2.0])
    state = optimizer.init(params)
    for gradient in (jnp.array([3.0, 0.5]), jnp.array([0.1, 0.2])):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        trace = 0.9 * trace + np.float64(gradient)
        expected = expected - 1e-2 * (trace + 0.5 * expected)
    np.testing.assert_allclose(params, expected, rtol=1e-5)


SGD = dict(optimizer__name='sgd', optimizer__beta2=None, optimizer__epsilon=None)


@pytest.mark.slow
def test_muon_orthogonalizes_block_matrices_and_uses_adam_for_rest():
    spec = make_tiny_spec(
        optimizer__name='muon', optimizer__warmup_steps=0, optimizer__weight_decay=0.0, optimizer__clip_norm=1e6
    )
    params = state.init_state(spec)['params']
    gradient = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)

    def compute_second_update(optimizer):
        _, optimizer_state = optimizer.update(gradient, optimizer.init(params), params)
        return optimizer.update(jax.tree.map(lambda x: x / 2, gradient), optimizer_state, params)[0]

    clip, adam = optax.clip_by_global_norm(1e6), optax.adamw(1e-2, b2=0.95, weight_decay=0.0, nesterov=True)
    adam, updates = compute_second_update(optax.chain(clip, adam)), compute_second_update(state.get_optimizer(spec))
    for name in ('embedding_VD', 'head_VD'):
        np.testing.assert_allclose(updates[name], adam[name], rtol=1e-4, atol=1e-6)
    for section, name, rows in (
        ('attention', 'query_DHK', 16),
        ('attention', 'output_HKD', 16),
        ('ffn', 'in_DF', 16),
    ):
        update, gradient_matrix = (
            np.asarray(tree['blocks'][section][name][0]).reshape(rows, -1) for tree in (updates, gradient)
        )
        update_values, gradient_values = (
            np.linalg.svd(matrix, compute_uv=False) for matrix in (update, gradient_matrix)
        )
        assert update_values.max() / update_values.min() < min(3.5, gradient_values.max() / gradient_values.min())


BLOCK_CHANGES = [
    dict(model__attention__feature_map='mlp', model__gate='elementwise', model__learned_kv__kind='kv'),
    dict(model__gate='value_state', model__learned_kv__kind='v', model__ffn='gelu', model__qk_norm=True),
    dict(model__combination='add_wide', model__learned_kv__kind='logit', model__head_norm=True),
    dict(model__norm='res_post', model__qk_norm=True),
]
VECTOR_NAMES = {'key_HK', 'value_HK', 'score_H'}  # one vector per head


@pytest.mark.parametrize('changes', BLOCK_CHANGES, ids=lambda changes: next(iter(changes)))
def test_muon_dimension_numbers_cover_exactly_block_matrices(changes):
    abstract = nnx.to_pure_dict(state.make_abstract_model(make_tiny_spec(**changes))[1])
    dimension_numbers = make_muon_dimension_numbers(state.make_abstract_model(make_tiny_spec(**changes))[1])
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        keys = [entry.key for entry in path]
        leaf_numbers = dimension_numbers
        for name in keys:
            leaf_numbers = leaf_numbers[name]
        if keys[0] != 'blocks' or leaf.ndim < 3 or keys[-1] in VECTOR_NAMES:
            assert leaf_numbers is None, keys
        else:
            input_axes, output_axes = leaf_numbers
            assert (*input_axes, *output_axes) == tuple(range(1, leaf.ndim)), keys
            assert len(input_axes) == (2 if keys[-1] == 'output_HKD' else 1), keys
