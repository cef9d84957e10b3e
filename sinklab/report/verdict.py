"""What paired differences say of a claim that one number is more than another, less than it, or the same."""

import numpy as np
from scipy.special import stdtrit

from sinklab.report.interval import FEWEST, interval, share_interval

LOOKS = 5, 8  # seeds: of every claim, and of those that the first look leaves open
LEVEL = 1 - 0.05 / len(LOOKS)  # of an interval at each look, so that all looks together err in 5 of 100
OVER = '95 % over two looks'
MOST = 1000  # seeds that are worth a figure

Bounds = tuple[float, float]


def bounds(values: list[float], binary: bool = False) -> Bounds | None:
    """The interval of a mean difference; binary ones, where none is below 0, are a share of so many seeds."""
    of = share_interval if is_share(values, binary) else interval
    return of(values, LEVEL)


def is_share(values: list[float], binary: bool) -> bool:
    return binary and {*values} <= {0.0, 1.0}


def verdict(bounds: Bounds, mean: float, way: str, least: float) -> str:
    """What an interval of a mean difference says.

    Of more or less: holds, where it lies on the claimed side of 0 and its mean is a difference that counts;
    contradicted, where it does on the other; not seen, where no difference in it counts. Of the same: the last holds,
    and an interval in which every difference counts contradicts.
    """
    low, high = bounds
    if way == '<':
        low, high, mean = -high, -low, -mean
    none_counts = -least < low and high < least
    if way == '=':
        all_count = least <= low or high <= -least
        return 'holds' if none_counts else 'contradicted' if all_count else 'unsettled'
    above, below = low > 0 and mean >= least, high < 0 and mean <= -least
    return 'holds' if above else 'contradicted' if below else 'not seen' if none_counts else 'unsettled'


def needed(values: list[float], way: str, least: float, binary: bool = False) -> int | None:
    """About so many seeds would settle it, by this mean and spread, if not skewed; None: more than are worth it."""
    if len(values) < FEWEST:
        return FEWEST
    more = range(len(values) + 1, MOST)
    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
    if is_share(values, binary):
        shares = ((n, share_interval([1.0] * round(mean * n) + [0.0] * (n - round(mean * n)), LEVEL)) for n in more)
        return next((n for n, found in shares if verdict(found, mean, way, least) != 'unsettled'), None)
    counts = abs(mean) - (least if way == '=' else 0)
    half = counts if abs(mean) >= least else least - abs(mean)  # of the widest interval that says something
    quantiles = ((n, float(stdtrit(n - 1, (1 + LEVEL) / 2))) for n in more)
    return next((n for n, quantile in quantiles if quantile * sd < half * n**0.5), None)
