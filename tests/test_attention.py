"""Tests of attention and masks against formulas in NumPy and float64."""

import dataclasses
import functools

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import compute_reference_attention, make_attention_spec
from conftest import OPERATIONS, make_attention_config
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.attn import reference
from sinklab.attn.mask import (
    make_block_mask,
    make_causal_mask,
    make_document_mask,
    make_prefix_mask,
    make_static_mask,
    make_window_mask,
)
from sinklab.attn.operations import resolve_operation
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
    assert all(
        jnp.isfinite(gradient).all()
        for gradient in vjp_function((jnp.ones_like(output), jnp.ones_like(attention_BHTS)))
    )


@pytest.mark.slow
@every_operation
def test_attention_ignores_masked_scores_of_any_magnitude(operation):
    query, key, value, bias = make_inputs(operation)
    for score in (1e4, -1e4, 1e30):
        masked_bias = np.where(np.tri(4, dtype=bool), bias, score).astype(np.float32)
        (expected, _), (output, _) = (
            compute_reference_attention((query, key, value, b), operation, make_causal_mask(4))
            for b in (bias, masked_bias)
        )
        np.testing.assert_array_equal(expected, output)
        arrays = query, key, value, masked_bias
        gradients = jax.grad(
            lambda arrays: compute_reference_attention(arrays, operation, make_causal_mask(4))[0].sum()
        )(arrays)
        assert all(jnp.isfinite(gradient).all() for gradient in gradients)
        assert (np.asarray(gradients[3])[..., ~np.tri(4, dtype=bool)] == 0).all()


@every_operation
def test_attention_gain_scales_output_and_weights(operation):
    arrays = make_inputs(operation)
    plain, scaled = (
        compute_reference_attention(arrays, dataclasses.replace(operation, gain=gain), make_causal_mask(4))
        for gain in (1.0, 0.1)
    )
    for expected, actual in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(actual, 0.1 * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('similarity', ['exp', 'sigmoid', 'elu1'])
def test_p_norm_of_power_one_equals_sum_normalizer(similarity):
    sum_config, p_norm_config = (
        make_attention_config(similarity, 'sum'),
        make_attention_config(similarity, 'p_norm', 1.0),
    )
    for actual, expected in zip(
        *(
            compute_reference_attention(make_inputs(sum_config), config, make_causal_mask(4))
            for config in (sum_config, p_norm_config)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    'operation', [operation for operation in ATTENTION_CONFIGS if operation.power], ids=format_case
)
@pytest.mark.parametrize('scale', [1.0, 30.0])
def test_p_norm_rows_have_unit_norm(operation, scale):
    _, attention_BHTS = compute_reference_attention(make_inputs(operation, scale), operation, make_causal_mask(4))
    np.testing.assert_allclose((np.float64(attention_BHTS) ** operation.power).sum(-1), 1, rtol=1e-3)


@pytest.mark.parametrize(
    'operation', [operation for operation in ATTENTION_CONFIGS if operation.power], ids=format_case
)
def test_p_norm_gives_weight_one_to_single_key_for_any_score(operation):
    score_S = jnp.array([-60.0, -30.0, -16.0, -1.0, 0.0, 1.0, 30.0, 60.0])
    weights, _ = reference.compute_weights(score_S[:, None], jnp.ones((8, 1), bool), resolve_operation(operation, 1))
    np.testing.assert_allclose(weights, 1, rtol=1e-5)


@pytest.mark.parametrize(
    'operation', [make_attention_config('exp', 'sum'), make_attention_config('exp', 'p_norm', 2.0)], ids=format_case
)
def test_attention_is_invariant_to_constant_added_to_scores(operation):
    query, key, value, bias = make_inputs(operation)
    plain, shifted = (
        compute_reference_attention((query, key, value, b), operation, make_causal_mask(4)) for b in (bias, bias + 7)
    )
    for actual, expected in zip(plain, shifted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(('normalizer', 'degree'), [('none', 1), ('count', 1), ('sum', 0)])
def test_relu_attention_is_homogeneous_in_scores(normalizer, degree):
    operation = make_attention_config('relu', normalizer)
    query, key, value, bias = make_inputs(operation)
    plain, tripled = (
        compute_reference_attention((factor * query, key, value, factor * bias), operation, make_causal_mask(4))
        for factor in (1, 3)
    )
    for actual, expected in zip(tripled, plain, strict=True):
        np.testing.assert_allclose(actual, 3**degree * expected, rtol=1e-4, atol=1e-6)


def test_attention_broadcasts_bias_over_all_axes():
    *arrays, _ = make_inputs(make_attention_config('sigmoid', 'none'))
    outputs = (
        compute_reference_attention(
            (*arrays, np.full(shape, -1.5)), make_attention_config('sigmoid', 'none'), make_causal_mask(4)
        )[0]
        for shape in [(1, 1, 1, 1), (1, 2, 4, 4), (1, 1, 4, 1)]
    )
    first, *others = outputs
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_attention_computes_in_float32_and_returns_dtype_of_values():
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in make_inputs(make_attention_config('exp', 'sum'))[:3]]
    output, _, attention_BHTS = reference.attend(
        *arrays, make_attention_spec(make_attention_config('exp', 'sum'), make_causal_mask(4))
    )
    assert (output.dtype, attention_BHTS.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(attention_BHTS.sum(-1), 1, rtol=1e-6)


lengths, sizes = st.sampled_from([1, 4, 9]), st.integers(1, 12)
few_examples = settings(max_examples=25, deadline=None)


def get_visible(mask, length):
    return np.asarray(mask.materialize(length))[0]


@few_examples
@given(lengths)
def test_causal_mask_shows_own_and_earlier_keys(length):
    np.testing.assert_array_equal(get_visible(make_causal_mask(length), length), np.tri(length, dtype=bool))


@few_examples
@given(lengths, sizes)
def test_prefix_mask_shows_prefix_to_all_queries(length, tokens):
    t, s = np.indices((length, length))
    np.testing.assert_array_equal(get_visible(make_prefix_mask(length, tokens), length), (s <= t) | (s < tokens))


@few_examples
@given(lengths, sizes)
def test_window_mask_with_causal_mask_shows_last_keys(length, keys):
    expected = [[t - keys < s <= t for s in range(length)] for t in range(length)]
    np.testing.assert_array_equal(
        get_visible(make_window_mask(length, keys) & make_causal_mask(length), length), expected
    )


@few_examples
@given(lengths, sizes)
def test_block_mask_shows_keys_of_same_block(length, keys):
    expected = [[t // keys == s // keys for s in range(length)] for t in range(length)]
    np.testing.assert_array_equal(get_visible(make_block_mask(length, keys), length), expected)


@few_examples
@given(st.lists(st.booleans(), min_size=9, max_size=9))
def test_document_mask_with_causal_mask_shows_keys_of_same_document(is_document_start):
    number_T = np.cumsum(is_document_start)
    start_T = [list(number_T).index(number) for number in number_T]
    actual = get_visible(
        make_document_mask(jnp.array([start_T])) & make_causal_mask(len(is_document_start)), len(is_document_start)
    )
    mask_config = MaskConfig(prefix=None, window=None, block=None, document=True)
    np.testing.assert_array_equal(actual, formulas.compute_visibility(len(is_document_start), mask_config, number_T))


intervals = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3)


def make_interval_mask(pairs):
    start, end = zip(*pairs, strict=True)
    return make_static_mask(np.array(start), np.array(end))


@few_examples
@given(intervals, intervals)
def test_mask_intersection_shows_keys_visible_in_both(first, second):
    expected = get_visible(make_interval_mask(first), 9) & get_visible(make_interval_mask(second), 9)
    np.testing.assert_array_equal(get_visible(make_interval_mask(first) & make_interval_mask(second), 9), expected)


@few_examples
@given(intervals, st.integers(0, 3))
def test_mask_padding_adds_queries_without_visible_keys(pairs, queries):
    actual = get_visible(make_interval_mask(pairs).pad(before=queries), 9)
    np.testing.assert_array_equal(
        actual, np.concatenate([np.zeros((queries, 9), bool), get_visible(make_interval_mask(pairs), 9)])
    )


def test_mask_intersection_applies_to_every_sequence_of_batch():
    starts = jnp.array([[0, 0, 2, 2], [0, 1, 1, 1]])
    actual = (make_causal_mask(4) & make_document_mask(starts)).materialize(4)
    for number, start_T in enumerate(np.asarray(starts)):
        expected = [[start_T[t] <= s <= t for s in range(4)] for t in range(4)]
        np.testing.assert_array_equal(actual[number], expected)
