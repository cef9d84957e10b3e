"""Timing of calls, and the text of measured values."""

import statistics
import time
from collections.abc import Callable, Iterable


def time_call(function: Callable[[], object]) -> float:
    """Return the wall-clock seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def format_spread(values: Iterable[float], number_format: str = '.2f', width: int = 0) -> str:
    """Format the median, aligned to the right in `width`, and in parentheses the extremes."""
    values = list(values)
    median, least, most = (
        format(value, number_format) for value in (statistics.median(values), min(values), max(values))
    )
    return f'{median.rjust(width)} ({least} to {most})'
