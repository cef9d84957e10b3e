"""Intervals of a mean over seeds: how often they cover the truth, and what they are of simple numbers."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sinklab.report.statistics import LOOK_CONFIDENCE_LEVEL, compute_mean_interval, compute_proportion_interval

REPEATS = 4000
QUANTILE = {n: stats.t.ppf(0.975, n - 1) for n in (5, 8)}
NOTHING = (0.0, lambda rng, shape: np.zeros(shape))


def shares(a, b):
    """Those of a beta distribution: (their mean, so many of them)."""
    return a / (a + b), lambda rng, shape: rng.beta(a, b, shape)


def covered(of, n, one, other):
    """How often an interval of n paired differences has the true one in it, in percent."""
    return 100 * np.mean(covers(of, differences(n, one, other), one[0] - other[0]))


def differences(n, one, other):
    rng = np.random.default_rng(0)
    return one[1](rng, (REPEATS, n)) - other[1](rng, (REPEATS, n))


def covers(of, difference_RN, truth):
    found = np.array([of(difference_N) for difference_N in difference_RN])
    return (found[:, 0] <= truth) & (truth <= found[:, 1])


SKEWED = pytest.mark.parametrize(
    ('one', 'other'),
    [
        (shares(2, 5), shares(2, 5)),
        (shares(4, 3), NOTHING),
        (shares(2, 8), NOTHING),
        (shares(8, 2), NOTHING),
        (shares(1, 4), NOTHING),
        (shares(0.7, 2), NOTHING),
        (shares(1, 4), shares(4, 4)),
    ],
    ids=['equal', '4/3', '2/8', '8/2', '1/4', '0.7/2', '1/4 and 4/4'],
)


@SKEWED
@pytest.mark.parametrize('n', [5, 8])
@pytest.mark.slow
def test_an_interval_of_skewed_shares_covers_the_truth_as_often_as_it_says(n, one, other):
    assert 92.9 <= covered(compute_mean_interval, n, one, other) <= 97


@SKEWED
@pytest.mark.slow
def test_two_looks_of_a_claim_both_cover_the_truth_as_often_as_it_says(one, other):
    """With five seeds, and with three more."""
    difference_RN, truth = differences(8, one, other), one[0] - other[0]
    look = functools.partial(compute_mean_interval, level=LOOK_CONFIDENCE_LEVEL)
    both = covers(look, difference_RN[:, :5], truth) & covers(look, difference_RN, truth)
    assert 93 <= 100 * np.mean(both) <= 97


@pytest.mark.parametrize('n', [5, 8])
@pytest.mark.slow
def test_no_interval_is_much_wider_than_students(n):
    """However skewed, where the plain cubic has some of 2.4 times that width."""
    rng = np.random.default_rng(0)
    for one in (
        rng.beta(0.7, 2, (REPEATS, n)),
        rng.beta(1, 4, (REPEATS, n)),
        -(10.0 ** rng.normal(0, 2, (REPEATS, n))),
    ):
        found, students = (
            [np.subtract(*of(number_N)) for number_N in one] for of in (compute_mean_interval, student)
        )
        ratio = np.divide(found, students)
        assert ratio.min() > 0.9
        assert ratio.max() < 1.6


def student(number_N):
    n = len(number_N)
    mean, half = np.mean(number_N), QUANTILE[n] * np.std(number_N, ddof=1) / n**0.5
    return mean - half, mean + half


@pytest.mark.parametrize('n', [5, 8])
@pytest.mark.parametrize('empty', [0.2, 0.3, 0.5, 0.7])
@pytest.mark.slow
def test_where_a_part_of_the_shares_is_0_it_covers_from_83_percent_on_and_no_less_than_students(n, empty):
    """Seeds without any sink beside seeds with one: five of them may miss a kind altogether."""

    def some(rng, shape):
        return np.where(rng.random(shape) < empty, 0, rng.normal(0.5, 0.1, shape))

    given = n, (0.5 * (1 - empty), some), NOTHING
    assert covered(compute_mean_interval, *given) >= 82
    assert covered(compute_mean_interval, *given) >= covered(student, *given) - 0.5


def test_of_skewed_shares_students_own_covers_less():
    given = 5, shares(1, 4), NOTHING
    assert covered(student, *given) < 92 < covered(compute_mean_interval, *given)


def test_of_symmetric_numbers_it_is_students():
    number_N = [-3.0, -1.0, 0.5, 2.0, 4.0]
    np.testing.assert_allclose(compute_mean_interval(number_N), student(number_N), rtol=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=5, max_size=9), st.floats(0.1, 10), st.floats(-50, 50))
def test_it_goes_along_with_units_and_with_signs(numbers, scale, shift):
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
def test_the_interval_of_a_share_is_that_of_an_exact_binomial_test(n, level):
    for ones in range(n + 1):
        expected = stats.binomtest(ones, n).proportion_ci(level, 'exact')
        np.testing.assert_allclose(
            compute_proportion_interval([1.0] * ones + [0.0] * (n - ones), level), expected, atol=1e-12
        )
    assert compute_proportion_interval([0.0] * 4) is None


def test_four_numbers_have_none_and_equal_ones_a_point():
    assert compute_mean_interval([1.0, 2.0, 3.0, 4.0]) is None
    assert compute_mean_interval([0.25] * 5) == (0.25, 0.25)
