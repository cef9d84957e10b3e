"""What a mean over a few seeds leaves open."""

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, stdtrit

LEVEL = 0.95
FEWEST = 5  # numbers; of three it would cover 81 to 92 %
FARTHEST = 0.95


def interval(numbers: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Of a mean: t = sqrt(n) (mean - mu) / s, made symmetric by its cubic (Hall, 1992, J. R. Statist. Soc. B 54).

    With g the skewness and x = t / sqrt(n): x + g x^2 / 3 + g^2 x^3 / 27 + g / 6n is held between the quantiles q of
    Student's t over sqrt(n). Where |g| q > sqrt(n) that reaches beyond the point at which the cubic stands still, and
    the interval is up to 2.4 times as wide as Student's: |g| is held to FARTHEST of that. Of skewed shares it covers
    93 to 95 % at a level of 0.95, where Student's own covers 91 to 95; where a part of the shares is 0, from 83 % on,
    as Student's.
    None of fewer than five numbers; a point where they are all one.
    """
    if len(numbers) < FEWEST:
        return None
    number_N = np.float64(numbers)
    n, mean, sd = len(number_N), number_N.mean(), number_N.std(ddof=1)
    if sd <= 1e-12 * max(1.0, abs(mean)):
        return float(mean), float(mean)
    central_N = number_N - mean
    skewness = (central_N**3).mean() / (central_N**2).mean() ** 1.5
    quantile = stdtrit(n - 1, (1 + level) / 2)
    largest = FARTHEST * n**0.5 / quantile
    skewness = np.clip(skewness, -largest, largest)
    low, high = (mean - sd * studentized(side * quantile, skewness, n) for side in (1, -1))
    return float(low), float(high)


def share_interval(numbers: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Of the share of ones among zeros and ones (Clopper and Pearson, 1934, Biometrika); it covers no less often."""
    if len(numbers) < FEWEST:
        return None
    n, ones, beyond = len(numbers), int(sum(numbers)), (1 - level) / 2
    low = betaincinv(ones, n - ones + 1, beyond) if ones else 0.0
    high = betaincinv(ones + 1, n - ones, 1 - beyond) if ones < n else 1.0
    return float(low), float(high)


def studentized(y: float, skewness: float, n: int) -> float:
    """x of the cubic's value y / sqrt(n)."""
    z = y / n**0.5 - skewness / (6 * n)
    return z if abs(skewness) < 1e-9 else 3 / skewness * (np.cbrt(1 + skewness * z) - 1)
