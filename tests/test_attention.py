"""Tests of attention and masks against formulas in NumPy and float64."""

import functools

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import compute_reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_specs import OPERATIONS, make_attention_config

from sinklab.attn.mask import make_causal_mask, make_static_mask, resolve_mask
from sinklab.config.spec import AttentionConfig, MaskConfig

POWERS = (0.25, 0.5, 2.0, 3.0)
ATTENTION_CONFIGS = [
    make_attention_config(similarity, normalizer, power)
    for similarity, normalizer in OPERATIONS
    for power in (POWERS if normalizer == 'p_norm' else (1.0,))
]


def format_case(value):
    if isinstance(value, AttentionConfig):
        return '-'.join(str(part) for part in (value.similarity, value.normalizer, value.power) if part)
    return str(value)


every_operation = pytest.mark.parametrize('operation', ATTENTION_CONFIGS, ids=format_case)


def make_inputs(operation, scale=1.0, batch=1, columns=0):
    """Return (query, key, value, bias) with scores of standard deviation `scale`.

    They are positive if the operation needs it.
    """
    rng, length, heads = np.random.default_rng(0), 4, 2

    def draw_normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    query, key = (draw_normal(batch, length + num_extra, heads, 4) * scale**0.5 for num_extra in (0, columns))
    value, bias = draw_normal(batch, length + columns, heads, 3), draw_normal(batch, heads, length, length + columns)
    if operation.feature_map == 'elu1':
        return formulas.elu1(query), formulas.elu1(key), value, abs(bias)
    return query, key, value, bias


def compute_reference(query, key, value, bias, visible_TS, operation, columns=0):
    """Compute (output_BTHK, attention_BHTS), one query at a time."""
    score = np.einsum('bthk,bshk->bhts', np.float64(query), key) / np.sqrt(query.shape[-1]) + bias
    compute_weights = functools.partial(
        formulas.compute_weights, visible_TS=visible_TS, attention=operation, columns=columns
    )
    attention_BHTS = np.stack([[compute_weights(head) for head in heads] for heads in score])
    return np.einsum('bhts,bshk->bthk', attention_BHTS, value), attention_BHTS


@every_operation
@pytest.mark.parametrize('scale', [1.0, 30.0])
@pytest.mark.parametrize('columns', [0, 1])
def test_attention_matches_float64_reference(operation, scale, columns):
    arrays = make_inputs(operation, scale, batch=3, columns=columns)
    output, attention_BHTS = compute_reference_attention(arrays, operation, make_causal_mask(4), columns=columns)
    visible_TS = np.insert(np.tri(4, dtype=bool), [0] * columns, True, axis=1)
    for actual, expected in zip(
        (output, attention_BHTS), compute_reference(*arrays, visible_TS, operation, columns), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-6)


@every_operation
@pytest.mark.parametrize('scale', [1.0, 30.0])
@pytest.mark.slow
def test_attention_gradient_matches_central_differences(operation, scale):
    arrays = [np.float64(array) for array in make_inputs(operation, scale, columns=1)]
    weight = np.random.default_rng(1).normal(size=(1, 4, 2, 3))
    visible_TS = np.insert(np.tri(4, dtype=bool), 0, True, axis=1)
    gradients = jax.grad(
        lambda arrays: jnp.sum(
            weight * compute_reference_attention(arrays, operation, make_causal_mask(4), columns=1)[0]
        )
    )([jnp.float32(array) for array in arrays])
    for index, gradient in enumerate(gradients):

        def compute_total(array, index=index):
            inputs = [*arrays[:index], array, *arrays[index + 1 :]]
            return np.sum(weight * compute_reference(*inputs, visible_TS, operation, columns=1)[0])

        expected = differentiate_numerically(compute_total, arrays[index])
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=1e-4 * max(1e-2, np.abs(expected).max()))


def differentiate_numerically(function, x, step=1e-5):
    """Compute the gradient of a function of an array by central differences."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        shift = np.zeros(x.shape)
        shift[index] = step
        gradient[index] = (function(x + shift) - function(x - shift)) / (2 * step)
    return gradient


@pytest.mark.slow
@every_operation
def test_attention_of_fully_masked_query_is_zero_with_finite_gradients(operation):
    mask = make_static_mask(np.array([0, 2, 0, 0]), np.array([1, 2, 3, 4]))
    arrays = [jnp.asarray(array) for array in make_inputs(operation, scale=50.0)]
    (output, attention_BHTS), vjp_function = jax.vjp(
        lambda *arrays: compute_reference_attention(arrays, operation, mask), *arrays
    )
    assert (output[:, 1] == 0).all()
    assert (attention_BHTS[:, :, 1] == 0).all()
    gradients = vjp_function((jnp.ones_like(output), jnp.ones_like(attention_BHTS)))
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.slow
@every_operation
def test_attention_ignores_masked_scores_of_any_magnitude(operation):
    query, key, value, bias = make_inputs(operation)
    is_hidden = ~np.tri(4, dtype=bool)

    def compute_output(bias):
        return compute_reference_attention((query, key, value, bias), operation, make_causal_mask(4))[0]

    for score in (1e4, -1e4, 1e30):
        masked_bias = np.where(is_hidden, score, bias).astype(np.float32)
        np.testing.assert_array_equal(compute_output(masked_bias), compute_output(bias))
        gradient = np.asarray(jax.grad(lambda bias: compute_output(bias).sum())(masked_bias))
        assert np.isfinite(gradient).all()
        assert (gradient[..., is_hidden] == 0).all()


LENGTH = 9
sizes = st.none() | st.integers(1, 12)
few_examples = settings(max_examples=50, deadline=None)


def get_visible(mask, length=LENGTH):
    return np.asarray(mask.materialize(length))


@few_examples
@given(
    sizes, sizes, sizes, st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2)
)
def test_mask_of_config_shows_keys_of_its_definition(prefix, window, block, is_document_start):
    """Combine kinds of masks, in a batch of two sequences with other documents; a prefix has no documents."""
    mask_config = MaskConfig(prefix=prefix, window=window, block=block, document=prefix is None)
    number_BT = np.cumsum(is_document_start, 1)
    start_BT = jnp.array([[list(number_T).index(number) for number in number_T] for number_T in number_BT])
    expected = [formulas.compute_visibility(LENGTH, mask_config, number_T) for number_T in number_BT]
    visible_BTS = get_visible(resolve_mask(mask_config, LENGTH, start_BT))
    np.testing.assert_array_equal(np.broadcast_to(visible_BTS, np.shape(expected)), expected)


@few_examples
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_mask_padding_adds_queries_without_visible_keys(intervals, before, after):
    mask = make_static_mask(*np.array(intervals).T)
    expected = np.pad(get_visible(mask), ((0, 0), (before, after), (0, 0)))
    np.testing.assert_array_equal(get_visible(mask.pad(before, after)), expected)
