"""Confidence intervals of a mean over seeds, and the verdict that an interval gives on a claim."""

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


def compute_proportion_interval(
    values: Sequence[float], level: float = CONFIDENCE_LEVEL
) -> tuple[float, float] | None:
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


LOOK_SEEDS = 5, 8  # seeds: of every claim, and of those that the first look leaves open
LOOK_CONFIDENCE_LEVEL = 1 - 0.05 / len(
    LOOK_SEEDS
)  # of an interval at each look, so that all looks together err in 5 of 100
INTERVAL_DESCRIPTION = '95 % over two looks'
MAX_SEEDS = 1000  # seeds that are worth a figure

Interval = tuple[float, float]


def compute_difference_interval(values: list[float], is_binary: bool = False) -> Interval | None:
    """The interval of a mean difference; binary ones, where none is below 0, are a share of so many seeds."""
    compute = compute_proportion_interval if is_proportion(values, is_binary) else compute_mean_interval
    return compute(values, LOOK_CONFIDENCE_LEVEL)


def is_proportion(values: list[float], is_binary: bool) -> bool:
    return is_binary and {*values} <= {0.0, 1.0}


def decide_verdict(interval: Interval, mean: float, way: str, least: float) -> str:
    """What an interval of a mean difference says.

    Of more or less: holds, where it lies on the claimed side of 0 and its mean is a difference that counts;
    contradicted, where it does on the other; not seen, where no difference in it counts. Of the same: the last holds,
    and an interval in which every difference counts contradicts.
    """
    low, high = interval
    if way == '<':
        low, high, mean = -high, -low, -mean
    none_counts = -least < low and high < least
    if way == '=':
        all_count = least <= low or high <= -least
        return 'holds' if none_counts else 'contradicted' if all_count else 'unsettled'
    above, below = low > 0 and mean >= least, high < 0 and mean <= -least
    return 'holds' if above else 'contradicted' if below else 'not seen' if none_counts else 'unsettled'


def estimate_needed_seeds(values: list[float], way: str, least: float, is_binary: bool = False) -> int | None:
    """About so many seeds would settle it, by this mean and spread, if not skewed; None: more than are worth it."""
    if len(values) < MIN_SAMPLES:
        return MIN_SAMPLES
    seed_counts = range(len(values) + 1, MAX_SEEDS)
    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
    if is_proportion(values, is_binary):
        shares = (
            (
                n,
                compute_proportion_interval(
                    [1.0] * round(mean * n) + [0.0] * (n - round(mean * n)), LOOK_CONFIDENCE_LEVEL
                ),
            )
            for n in seed_counts
        )
        return next(
            (
                n
                for n, proportion_interval in shares
                if decide_verdict(proportion_interval, mean, way, least) != 'unsettled'
            ),
            None,
        )
    effect = abs(mean) - (least if way == '=' else 0)
    half_width = effect if abs(mean) >= least else least - abs(mean)  # of the widest interval that says something
    quantiles = ((n, float(stdtrit(n - 1, (1 + LOOK_CONFIDENCE_LEVEL) / 2))) for n in seed_counts)
    return next((n for n, quantile in quantiles if quantile * sd < half_width * n**0.5), None)
