"""Timing of functions in turns, and the text of measured values."""

import statistics
import time
from collections.abc import Callable, Iterable

import jax


def time_in_turns(
    functions: dict[str, Callable[[], object]], rounds: int, num_calls: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of a call of each function in each round, after a call of each that is not timed.

    Args:
        functions: The functions by name; one call of each follows another, so that all meet the same load.
        rounds: The number of rounds.
        num_calls: Calls of a function at a time, so that the overhead of a launch does not count.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(num_calls):
                result = function()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / num_calls)
    return seconds


def format_spread(values: Iterable[float], number_format: str = '.2f') -> str:
    """Format the median, and in parentheses the extremes."""
    values = list(values)
    median, least, most = (
        format(value, number_format) for value in (statistics.median(values), min(values), max(values))
    )
    return f'{median} ({least} to {most})'
