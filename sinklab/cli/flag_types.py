"""Types of command-line options for argparse: numbers with a range."""

import argparse
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from sinklab.config.spec import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


def make_parser(field_type: Any) -> Callable[[str], Any]:
    """Make a function that parses a text as a number type of sinklab.config.spec."""

    def parse(text: str) -> Any:
        try:
            return msgspec.convert(text, field_type, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f'{text} must be {get_args(field_type)[1].description}') from None

    return parse


positive_int = make_parser(PositiveInt)
non_negative_int = make_parser(NonNegativeInt)
positive_float = make_parser(PositiveFloat)
non_negative_float = make_parser(NonNegativeFloat)
