"""What paired differences say of a claim that one number is more than another, less than it, or the same."""

import numpy as np
from scipy.special import stdtrit

from sinklab.report.interval import MIN_SAMPLES, compute_mean_interval, compute_proportion_interval

LOOK_SEEDS = 5, 8  # seeds: of every claim, and of those that the first look leaves open
LOOK_CONFIDENCE_LEVEL = 1 - 0.05 / len(LOOK_SEEDS)  # of an interval at each look, so that all looks together err in 5 of 100
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
        shares = ((n, compute_proportion_interval([1.0] * round(mean * n) + [0.0] * (n - round(mean * n)), LOOK_CONFIDENCE_LEVEL)) for n in seed_counts)
        return next((n for n, proportion_interval in shares if decide_verdict(proportion_interval, mean, way, least) != 'unsettled'), None)
    effect = abs(mean) - (least if way == '=' else 0)
    half_width = effect if abs(mean) >= least else least - abs(mean)  # of the widest interval that says something
    quantiles = ((n, float(stdtrit(n - 1, (1 + LOOK_CONFIDENCE_LEVEL) / 2))) for n in seed_counts)
    return next((n for n, quantile in quantiles if quantile * sd < half_width * n**0.5), None)
