"""Types of the arguments of benchmarks."""

import argparse

from sinklab.cli.hardware_flags import check_remat
from sinklab.config.seed_list import parse_seeds
from sinklab.errors import UserError


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f'{text} is not a whole number of at least 1')
    return int(text)


def parse_seed_list(text: str) -> list[int]:
    try:
        return parse_seeds(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_remat(text: str) -> str:
    try:
        check_remat(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
