"""Types of the arguments of benchmarks."""

import argparse
import math

from sinklab.config.seed_list import parse_seeds
from sinklab.errors import UserError


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f'{text} is not a whole number of at least 1')
    return int(text)


def parse_counts(text: str) -> list[int]:
    """Parse whole numbers of at least 1, separated by commas."""
    return [parse_count(item) for item in text.split(',')]


def parse_positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f'{text} is not a number above 0')
    return number


def parse_seed_list(text: str) -> list[int]:
    try:
        return parse_seeds(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
