"""Confidence intervals of a mean over seeds: coverage and exact values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sinklab.report.statistics import LOOK_CONFIDENCE_LEVEL, compute_mean_interval, compute_proportion_interval

REPEATS = 4000
ZEROS = (0.0, lambda rng, shape: np.zeros(shape))


def make_beta_shares(a, b):
    """Return the mean of a beta distribution and a function that draws samples."""
    return a / (a + b), lambda rng, shape: rng.beta(a, b, shape)


def compute_coverage(compute_interval, n, first, second):
    """Return the coverage of an interval of n paired differences in percent."""
    return 100 * np.mean(find_covered(compute_interval, draw_differences(n, first, second), first[0] - second[0]))


def draw_differences(n, first, second):
    rng = np.random.default_rng(0)
    return first[1](rng, (REPEATS, n)) - second[1](rng, (REPEATS, n))


def find_covered(compute_interval, difference_RN, truth):
    intervals = np.array([compute_interval(difference_N) for difference_N in difference_RN])
    return (intervals[:, 0] <= truth) & (truth <= intervals[:, 1])


SKEWED = pytest.mark.parametrize(
    ('first', 'second'),
    [
        (make_beta_shares(2, 5), make_beta_shares(2, 5)),
        (make_beta_shares(4, 3), ZEROS),
        (make_beta_shares(8, 2), ZEROS),
        (make_beta_shares(1, 4), ZEROS),
        (make_beta_shares(0.7, 2), ZEROS),
        (make_beta_shares(1, 4), make_beta_shares(4, 4)),
    ],
    ids=['equal', '4/3', '8/2', '1/4', '0.7/2', '1/4 and 4/4'],
)


@SKEWED
@pytest.mark.parametrize('n', [5, 8])
@pytest.mark.slow
def test_mean_interval_of_skewed_samples_has_nominal_coverage(n, first, second):
    assert 92.9 <= compute_coverage(compute_mean_interval, n, first, second) <= 97


def compute_student_interval(number_N):
    n = len(number_N)
    half_width = stats.t.ppf(0.975, n - 1) * np.std(number_N, ddof=1) / n**0.5
    return np.mean(number_N) - half_width, np.mean(number_N) + half_width


def test_mean_interval_of_symmetric_samples_equals_student_interval():
    number_N = [-3.0, -1.0, 0.5, 2.0, 4.0]
    np.testing.assert_allclose(compute_mean_interval(number_N), compute_student_interval(number_N), rtol=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=5, max_size=9), st.floats(0.1, 10), st.floats(-50, 50))
def test_mean_interval_is_equivariant_under_scale_shift_and_sign(numbers, scale, shift):
    number_N = np.round(numbers, 3)
    low, high = compute_mean_interval(number_N)
    assert low <= number_N.mean() <= high or np.isclose(low, high)
    tolerance = dict(rtol=1e-6, atol=1e-6 * scale * (1 + np.abs(number_N).max()))
    np.testing.assert_allclose(
        compute_mean_interval(scale * number_N + shift), [scale * low + shift, scale * high + shift], **tolerance
    )
    np.testing.assert_allclose(compute_mean_interval(-number_N), [-high, -low], **tolerance)


@pytest.mark.parametrize('n', [5, 8, 13])
@pytest.mark.parametrize('level', [0.95, LOOK_CONFIDENCE_LEVEL])
def test_proportion_interval_matches_exact_binomial_test(n, level):
    for ones in range(n + 1):
        expected = stats.binomtest(ones, n).proportion_ci(level, 'exact')
        np.testing.assert_allclose(
            compute_proportion_interval([1.0] * ones + [0.0] * (n - ones), level), expected, atol=1e-12
        )
    assert compute_proportion_interval([0.0] * 4) is None


def test_mean_interval_needs_five_values_and_is_point_for_equal_values():
    assert compute_mean_interval([1.0, 2.0, 3.0, 4.0]) is None
    assert compute_mean_interval([0.25] * 5) == (0.25, 0.25)
