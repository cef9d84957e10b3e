"""Options of the command line as tables, and their types: numbers with a range."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import msgspec

from sinklab.config.spec import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, tuple[Any, str, str]]) -> None:
    """Add options with a value.

    Args:
        parser: The parser of a command.
        options: {name: (type, metavar, help)}; the type is a function of a text, or a tuple of allowed texts.
    """
    for name, (value_type, metavar, help_text) in options.items():
        kind = dict(choices=value_type) if isinstance(value_type, tuple) else dict(type=value_type)
        parser.add_argument(f'--{name}', metavar=metavar, help=help_text, **kind)


def format_options(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Format the options that differ from their defaults, as arguments of a command."""
    values = {name: getattr(args, name) for name in names}
    return [
        f'--{name}={"none" if value is None else value}'
        for name, value in values.items()
        if value != args.parser.get_default(name)
    ]


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
