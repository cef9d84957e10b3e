"""Types of command-line options for argparse: numbers with a range."""

import argparse
import math


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1 and below 2^31."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f'{text} must be a whole number of at least 1')
    return int(text)


def non_negative_int(text: str) -> int:
    """Parse a whole number of at least 0 and below 2^31."""
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f'{text} must be a whole number of at least 0')
    return int(text)


def non_negative_float(text: str) -> float:
    """Parse a finite number of at least 0."""
    number = parse_float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f'{text} must be a number of at least 0')
    return number


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
