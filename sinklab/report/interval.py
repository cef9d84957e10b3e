"""What a mean over a few seeds leaves open."""

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, stdtrit

CONFIDENCE_LEVEL = 0.95
MIN_SAMPLES = 5  # numbers; of three it would cover 81 to 92 %
MAX_SKEWNESS_FRACTION = 0.95


def compute_mean_interval(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> tuple[float, float] | None:
    """Of a mean: t = sqrt(n) (mean - mu) / s, made symmetric by its cubic (Hall, 1992, J. R. Statist. Soc. B 54).

    With g the skewness and x = t / sqrt(n): x + g x^2 / 3 + g^2 x^3 / 27 + g / 6n is held between the quantiles q of
    Student's t over sqrt(n). Where |g| q > sqrt(n) that reaches beyond the point at which the cubic stands still, and
    the interval is up to 2.4 times as wide as Student's: |g| is held to FARTHEST of that. Of skewed shares it covers
    93 to 95 % at a level of 0.95, where Student's own covers 91 to 95; where a part of the shares is 0, from 83 % on,
    as Student's.
    None of fewer than five numbers; a point where they are all one.
    """
    if len(values) < MIN_SAMPLES:
        return None
    value_N = np.float64(values)
    n, mean, sd = len(value_N), value_N.mean(), value_N.std(ddof=1)
    if sd <= 1e-12 * max(1.0, abs(mean)):
        return float(mean), float(mean)
    central_N = value_N - mean
    skewness = (central_N**3).mean() / (central_N**2).mean() ** 1.5
    quantile = stdtrit(n - 1, (1 + level) / 2)
    largest = MAX_SKEWNESS_FRACTION * n**0.5 / quantile
    skewness = np.clip(skewness, -largest, largest)
    low, high = (mean - sd * invert_hall_cubic(side * quantile, skewness, n) for side in (1, -1))
    return float(low), float(high)


def compute_proportion_interval(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> tuple[float, float] | None:
    """Of the share of ones among zeros and ones (Clopper and Pearson, 1934, Biometrika); it covers no less often."""
    if len(values) < MIN_SAMPLES:
        return None
    n, ones, tail = len(values), int(sum(values)), (1 - level) / 2
    low = betaincinv(ones, n - ones + 1, tail) if ones else 0.0
    high = betaincinv(ones + 1, n - ones, 1 - tail) if ones < n else 1.0
    return float(low), float(high)


def invert_hall_cubic(y: float, skewness: float, n: int) -> float:
    """x of the cubic's value y / sqrt(n)."""
    z = y / n**0.5 - skewness / (6 * n)
    return z if abs(skewness) < 1e-9 else 3 / skewness * (np.cbrt(1 + skewness * z) - 1)
