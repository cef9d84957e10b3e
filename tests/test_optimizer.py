import jax.numpy as jnp
import numpy as np
import optax
from conftest import tiny

from sinklab.train.optimizer import schedule, transformation


def rates(**changes):
    optimizer = tiny(**{f'optimizer__{name}': value for name, value in changes.items()}).optimizer
    return np.array([schedule(optimizer)(step) for step in range(optimizer.steps + 1)])


def test_a_constant_schedule_climbs_from_zero_and_stays():
    found = rates(steps=20, warmup_steps=4, peak_learning_rate=0.8)
    np.testing.assert_allclose(found, np.minimum(0.2 * np.arange(21), 0.8), rtol=1e-6)


def test_a_cosine_schedule_climbs_and_falls_to_its_end():
    found = rates(steps=20, warmup_steps=4, peak_learning_rate=0.8, schedule='cosine', final_learning_rate=0.1)
    angle = np.pi * (np.arange(21) - 4) / 16
    falling = 0.1 + 0.7 * (1 + np.cos(angle)) / 2
    np.testing.assert_allclose(found, np.where(np.arange(21) < 4, 0.2 * np.arange(21), falling), rtol=1e-5)


def test_adamw_clips_decouples_its_decay_and_spares_no_parameter():
    spec = tiny(optimizer__warmup_steps=0, optimizer__weight_decay=0.5, optimizer__clip_norm=1.0).optimizer
    optimizer = transformation(spec)
    params = {'gain': jnp.array([1.0, -2.0]), 'weight': jnp.array([[3.0]])}
    gradients = [
        {'gain': jnp.array([3.0, 0.0]), 'weight': jnp.array([[4.0]])},
        {'gain': jnp.array([0.1, 0.2]), 'weight': jnp.array([[0.3]])},
    ]
    state, expected = optimizer.init(params), {name: np.float64(value) for name, value in params.items()}
    mean, square = (dict.fromkeys(params, 0.0) for _ in range(2))
    for step, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in gradient.values()))
        for name in expected:
            g = np.float64(gradient[name]) / max(norm, 1.0)
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g**2
            direction = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.95**step)) + 1e-8)
            expected[name] = expected[name] - 1e-2 * (direction + 0.5 * expected[name])
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)
