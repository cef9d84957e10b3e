"""Confidence intervals of a mean over seeds, and verdicts on claims based on such intervals."""

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, stdtrit

CONFIDENCE_LEVEL = 0.95
MIN_SAMPLES = 5  # an interval of three values would cover the mean in only 81 to 92 % of cases
MAX_SKEWNESS_FRACTION = 0.95  # of the skewness at which the interval reaches the stationary point of the cubic


def compute_mean_interval(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> tuple[float, float] | None:
    """Compute a confidence interval of a mean, corrected for skewness by Hall's cubic transformation.

    Hall (1992, J. R. Statist. Soc. B 54) makes t = sqrt(n) (mean - mu) / s more symmetric. With skewness g and
    x = t / sqrt(n), the transformed value is x + g x^2 / 3 + g^2 x^3 / 27 + g / 6n. The interval holds each mu whose
    transformed value lies between the quantiles -q and q of Student's t, divided by sqrt(n).

    If |g| q > sqrt(n), the interval reaches beyond the stationary point of the cubic and becomes up to 2.4 times as
    wide as Student's. Therefore |g| is limited to MAX_SKEWNESS_FRACTION of sqrt(n) / q.

    For skewed shares at a level of 0.95, the coverage is 93 to 95 % (Student's interval: 91 to 95 %). If some of the
    shares are 0, the coverage can fall to 83 %, as with Student's interval.

    Args:
        values: One value per seed.
        level: The confidence level.

    Returns:
        The lower and the upper limit. They are equal if all values are equal. None for fewer than MIN_SAMPLES values.
    """
    if len(values) < MIN_SAMPLES:
        return None
    value_N = np.float64(values)
    mean, sd, skewness = compute_moments(value_N)
    return compute_hall_interval(mean, sd, skewness, len(value_N), level)


def compute_moments(value_N: np.ndarray) -> tuple[float, float, float]:
    """Compute mean, sample standard deviation and skewness; the last two are 0 if all values are equal."""
    mean = value_N.mean()
    sd = value_N.std(ddof=1)
    if sd <= 1e-12 * max(1.0, abs(mean)):
        return float(mean), 0.0, 0.0
    central_N = value_N - mean
    return float(mean), float(sd), float((central_N**3).mean() / (central_N**2).mean() ** 1.5)


def compute_hall_interval(mean: float, sd: float, skewness: float, n: int, level: float) -> tuple[float, float]:
    """Compute the interval of `compute_mean_interval` from the moments of n values."""
    quantile = stdtrit(n - 1, (1 + level) / 2)
    largest = MAX_SKEWNESS_FRACTION * n**0.5 / quantile
    skewness = np.clip(skewness, -largest, largest)
    low, high = (mean - sd * invert_hall_cubic(side * quantile, skewness, n) for side in (1, -1))
    return float(low), float(high)


def compute_proportion_interval(
    values: Sequence[float], level: float = CONFIDENCE_LEVEL
) -> tuple[float, float] | None:
    """Compute a Clopper-Pearson confidence interval of the share of ones among zeros and ones.

    The coverage is at least the confidence level. Source: Clopper and Pearson (1934), Biometrika.

    Args:
        values: A 0 or 1 per seed.
        level: The confidence level.

    Returns:
        The lower and the upper limit. None for fewer than MIN_SAMPLES values.
    """
    if len(values) < MIN_SAMPLES:
        return None
    n = len(values)
    ones = int(sum(values))
    tail = (1 - level) / 2
    low = betaincinv(ones, n - ones + 1, tail) if ones else 0.0
    high = betaincinv(ones + 1, n - ones, 1 - tail) if ones < n else 1.0
    return float(low), float(high)


def invert_hall_cubic(y: float, skewness: float, n: int) -> float:
    """Return the x at which Hall's cubic has the value `y / sqrt(n)`."""
    z = y / n**0.5 - skewness / (6 * n)
    return z if abs(skewness) < 1e-9 else 3 / skewness * (np.cbrt(1 + skewness * z) - 1)


LOOK_SEEDS = 5, 8  # number of seeds at the first look (all claims) and at the second (claims still unsettled)
# The level of the interval at each look. By Bonferroni correction, all looks together err in at most 5 % of cases.
LOOK_CONFIDENCE_LEVEL = 1 - 0.05 / len(LOOK_SEEDS)
MAX_SEEDS = 1000  # estimates of this many seeds or more are not reported as a number

Interval = tuple[float, float]


def compute_difference_interval(values: list[float], is_binary: bool = False) -> Interval | None:
    """Compute the confidence interval of a mean difference at LOOK_CONFIDENCE_LEVEL.

    Args:
        values: The difference of each seed.
        is_binary: Whether both readings are 0 or 1. If then no difference is -1, the differences are treated as a
            proportion of seeds.

    Returns:
        The lower and the upper limit. None for fewer than MIN_SAMPLES values.
    """
    compute = compute_proportion_interval if is_proportion(values, is_binary) else compute_mean_interval
    return compute(values, LOOK_CONFIDENCE_LEVEL)


def is_proportion(values: list[float], is_binary: bool) -> bool:
    return is_binary and {*values} <= {0.0, 1.0}


def decide_verdict(interval: Interval, mean: float, relation: str, min_difference: float) -> str:
    """Decide the verdict on a claim from the confidence interval of the mean difference.

    A difference counts if its absolute value is at least `min_difference`. The first row that applies decides.

    Verdict for `>` and `<`  Condition
    holds                    The interval is on the claimed side of 0, and the mean is on that side and counts.
    contradicted             The interval is on the other side of 0, and the mean is on that side and counts.
    not seen                 No difference in the interval counts.
    unsettled                None of these.

    Verdict for `=`          Condition
    holds                    No difference in the interval counts.
    contradicted             Every difference in the interval counts.
    unsettled                None of these.

    Args:
        interval: The limits of the confidence interval.
        mean: The mean difference.
        relation: What is claimed: `>`, `<` or `=`.
        min_difference: The smallest difference that counts.
    """
    low, high = interval
    if relation == '<':
        low, high, mean = -high, -low, -mean
    none_counts = -min_difference < low and high < min_difference
    if relation == '=':
        all_count = min_difference <= low or high <= -min_difference
        return 'holds' if none_counts else 'contradicted' if all_count else 'unsettled'
    above, below = low > 0 and mean >= min_difference, high < 0 and mean <= -min_difference
    return 'holds' if above else 'contradicted' if below else 'not seen' if none_counts else 'unsettled'


def estimate_needed_seeds(
    values: list[float], relation: str, min_difference: float, is_binary: bool = False
) -> int | None:
    """Estimate how many seeds would settle a claim, assuming the observed mean, spread and skewness.

    Args:
        values: The difference of each seed so far, of at least MIN_SAMPLES seeds.
        relation: What is claimed: `>`, `<` or `=`.
        min_difference: The smallest difference that counts.
        is_binary: Whether both readings are 0 or 1.

    Returns:
        The number of seeds; None if MAX_SEEDS or more are needed.
    """
    mean, sd, skewness = compute_moments(np.float64(values))

    def predict_interval(n: int) -> Interval:
        if not is_proportion(values, is_binary):
            return compute_hall_interval(mean, sd, skewness, n, LOOK_CONFIDENCE_LEVEL)
        num_ones = round(mean * n)
        interval = compute_proportion_interval([1.0] * num_ones + [0.0] * (n - num_ones), LOOK_CONFIDENCE_LEVEL)
        assert interval is not None  # there are at least MIN_SAMPLES values
        return interval

    for n in range(len(values) + 1, MAX_SEEDS):
        if decide_verdict(predict_interval(n), mean, relation, min_difference) != 'unsettled':
            return n
    return None
