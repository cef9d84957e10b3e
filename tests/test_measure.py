import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sinklab.measure import activations, sink


def importance_by_hand(A, k, columns=0):
    """alpha_k (k from 1): the mean of column k over the queries that can see it."""
    length = A.shape[0]
    return sum(A[i, columns + k - 1] for i in range(k - 1, length)) / (length - k + 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2), st.integers(0, 2**31))
def test_importance_is_a_mean_over_the_queries_that_see_a_key(length, columns, seed):
    A = np.random.default_rng(seed).random((2, length, length + columns))
    A[..., columns:] *= np.tril(np.ones((length, length)))
    keys = min(length, 4)
    found = sink.importance(A, keys, columns)
    expected = [[importance_by_hand(a, k, columns) for k in range(1, keys + 1)] for a in A]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_uniform_attention_stands_on_the_floor():
    A = np.tril(np.ones((64, 64))) / np.arange(1, 65)[:, None]
    np.testing.assert_allclose(sink.importance(A, 1)[0], sink.floor(64), rtol=1e-6)
    assert round(sink.floor(64), 4) == 0.0741


def test_the_indicator_is_strict_and_taken_of_each_sequence_before_the_mean():
    alpha_LPH = np.array([[[0.3], [0.31], [0.9], [0.0]]])  # one layer, four sequences, one head
    assert sink.rate(alpha_LPH) == 50.0
    assert sink.rate(alpha_LPH.mean(1)) == 100.0  # the mean over sequences would hide it


@settings(max_examples=30, deadline=None)
@given(arrays(np.float64, (3, 4, 4), elements=st.floats(-5, 5).filter(lambda x: x == 0 or abs(x) > 1e-3)))
def test_a_proxy_row_sums_to_one_or_is_empty(A):
    proxy = np.asarray(sink.proxy(A), np.float64)
    empty = (A == 0).all(-1)
    np.testing.assert_allclose(proxy.sum(-1), np.where(empty, 0, 1), atol=1e-4)
    assert (proxy >= 0).all()


def test_the_proxy_of_a_normalized_row_is_itself():
    A = np.random.default_rng(0).dirichlet(np.ones(9), 5)
    np.testing.assert_allclose(sink.proxy(A), A, rtol=1e-6)
    np.testing.assert_allclose(sink.mass(A), 1)


def test_numbers_name_what_they_are():
    alpha_LPHK = np.zeros((2, 3, 4, 5))
    alpha_LPHK[0, :, :, 0] = 0.45
    found = sink.numbers(alpha_LPHK, np.full((2, 3, 4), 7.0), 64)
    assert (found['sink/1'], found['sink/1@0.4'], found['sink/1@0.5'], found['sink/2']) == (50, 50, 0, 0)
    assert found['alpha/1'] == pytest.approx(0.225)
    assert found['mass/row'] == 7
    assert 'sink/6' not in found


def test_the_norm_ratio_is_a_ratio_of_means_over_sequences():
    residual_LPTD = np.random.default_rng(0).normal(size=(2, 5, 6, 3))
    norm = np.sqrt((residual_LPTD**2).sum(-1))
    np.testing.assert_allclose(activations.norms(residual_LPTD), norm, rtol=1e-5)
    found = activations.numbers(norm)
    for layer in range(2):
        expected = norm[layer, :, 0].mean() / norm[layer, :, 1:].mean()
        assert found[f'norm/ratio/{layer + 1:02}'] == pytest.approx(expected)
