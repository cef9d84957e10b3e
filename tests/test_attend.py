"""Attention against its textbook formulas, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPERATIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from reference import attention as textbook

from sinklab.attend import dense
from sinklab.attend.mask import Mask, causal
from sinklab.spec import Attention


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
@pytest.mark.parametrize('scale', [1.0, 30.0])
def test_every_operation_equals_its_formula(similarity, normalizer, scale):
    query, key, value = (scale**0.5 * random(seed, 2, 7, 3, 4) for seed in range(3))
    output, attention = dense.attend(query, key, value, Attention(similarity, normalizer), causal(7))
    visible = np.tril(np.ones((7, 7), bool))
    for b in range(2):
        for h in range(3):
            q, k, v = (np.float64(x[b, :, h]) for x in (query, key, value))
            expected = textbook(q @ k.T / 2, visible, similarity, normalizer)
            np.testing.assert_allclose(attention[b, h], expected, atol=2e-6)
            np.testing.assert_allclose(output[b, :, h], expected @ v, atol=2e-5)


@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
def test_every_gradient_equals_the_numerical_one(similarity, normalizer):
    def output(query, key, value):
        return dense.attend(query, key, value, Attention(similarity, normalizer), causal(5))[0]

    check_grads(output, [random(seed, 1, 5, 2, 4) for seed in range(3)], order=1, modes=['rev'], rtol=2e-2)


@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(similarity, normalizer):
    mask = Mask(jnp.array([0, 2, 0]), jnp.array([1, 2, 3]))

    def output(x):
        return dense.attend(x, x, x, Attention(similarity, normalizer), mask)[0]

    x = 50 * random(0, 1, 3, 2, 4)
    assert (output(x)[:, 1] == 0).all()
    assert jnp.isfinite(jax.grad(lambda x: output(x).sum())(x)).all()


@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
def test_hidden_scores_of_any_size_change_nothing(similarity, normalizer):
    query, key, value = (random(seed, 1, 4, 1, 2) for seed in range(3))
    huge = key.at[:, 3].set(1e4 * jnp.sign(query[:, 0]))
    attend = lambda key: dense.attend(query, key, value, Attention(similarity, normalizer), causal(4))[0]  # noqa: E731
    np.testing.assert_array_equal(attend(key)[:, :3], attend(huge)[:, :3])
    assert jnp.isfinite(jax.grad(lambda key: attend(key)[:, :3].sum())(huge)).all()


intervals = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3)


@settings(max_examples=50, deadline=None)
@given(intervals, intervals)
def test_an_intersection_of_masks_shows_what_both_show(one, other):
    def mask(pairs):
        start, end = zip(*pairs, strict=True)
        return Mask(jnp.array(start), jnp.array(end))

    both = np.asarray(mask(one).visible(9)) & np.asarray(mask(other).visible(9))
    np.testing.assert_array_equal((mask(one) & mask(other)).visible(9), both)


def test_causal_shows_each_query_itself_and_what_is_before_it():
    np.testing.assert_array_equal(causal(6).visible(6), np.tril(np.ones((6, 6), bool)))
