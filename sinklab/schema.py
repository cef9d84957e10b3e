"""Conversion of nested mappings to frozen dataclasses, with validation of each field.

The type of a field contains its rules: `Literal` lists the allowed values, and `Annotated` has a `Constraint`.
"""

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sinklab.errors import UserError

MAX_LISTED_NAMES = 30  # a message does not list more allowed names


@dataclasses.dataclass(frozen=True)
class Constraint:
    description: str
    is_satisfied: Callable[[Any], bool]


# Steps and array indices are int32.
PositiveInt = Annotated[int, Constraint('a whole number of at least 1, below 2^31', lambda x: 1 <= x < 2**31)]
NonNegativeInt = Annotated[int, Constraint('a whole number of at least 0, below 2^31', lambda x: 0 <= x < 2**31)]
Bool = Annotated[bool, Constraint('True or False', lambda x: True)]
FiniteFloat = Annotated[float, Constraint('a finite number', math.isfinite)]
PositiveFloat = Annotated[float, Constraint('a finite number above 0', lambda x: 0 < x < math.inf)]
NonNegativeFloat = Annotated[float, Constraint('a finite number of at least 0', lambda x: 0 <= x < math.inf)]
OpenUnitInterval = Annotated[float, Constraint('a number between 0 and 1, both excluded', lambda x: 0 < x < 1)]
LeftOpenUnitInterval = Annotated[float, Constraint('a number above 0 and at most 1', lambda x: 0 < x <= 1)]
UnitInterval = Annotated[float, Constraint('a number from 0 to 1', lambda x: 0 <= x <= 1)]
DecayRate = Annotated[float, Constraint('a number of at least 0 and below 1', lambda x: 0 <= x < 1)]
Seed = Annotated[int, Constraint('a whole number from 0 to 2^32 - 1', lambda x: 0 <= x < 2**32)]
NonEmptyStr = Annotated[str, Constraint('a text that is not empty', bool)]


def parse_dataclass(dataclass_type: type, value: Any, path: str) -> Any:
    """Convert a nested mapping to a frozen dataclass; raise one UserError that names every invalid field."""
    errors: list[str] = []
    parsed = validate_dataclass(dataclass_type, value, path, errors)
    raise_errors(errors)
    return parsed


def raise_errors(errors: Iterable[str]) -> None:
    """Raise one UserError with all errors in one line; do nothing if there are none."""
    distinct = list(dict.fromkeys(errors))
    if len(distinct) == 1:
        raise UserError(distinct[0])
    if distinct:
        numbered = '; '.join(f'({number}) {error}' for number, error in enumerate(distinct, 1))
        raise UserError(f'{len(distinct)} faults: {numbered}')


def check_value(hint: Any, value: Any, path: str) -> Any:
    """Validate one value by its type hint and return it; raise UserError if it is not of that type."""
    errors: list[str] = []
    parsed = validate_value(hint, value, path, errors)
    raise_errors(errors)
    return parsed


def validate_dataclass(dataclass_type: type, mapping: Any, path: str, errors: list[str]) -> Any:
    """Convert a mapping to a dataclass, and append errors to `errors`; with errors the result is invalid."""
    hints = get_field_hints(dataclass_type)
    if not isinstance(mapping, Mapping):
        errors.append(f'{path} is {mapping!r}; it must have the fields {", ".join(hints)}')
        return None
    errors.extend(format_unknown_name(f'{path}.{name}', name, hints) for name in mapping if name not in hints)
    if missing := [name for name in hints if name not in mapping]:
        missing_paths = ', '.join(f'{path}.{name}' for name in missing)
        verb = 'is' if len(missing) == 1 else 'are'
        errors.append(f'{missing_paths} {verb} missing; start from configs/default.py, which has every field')
    values = {
        name: validate_value(hint, mapping[name], f'{path}.{name}', errors)
        for name, hint in hints.items()
        if name in mapping
    }
    return None if missing else dataclass_type(**values)


def validate_value(hint: Any, value: Any, path: str, errors: list[str]) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return validate_dataclass(hint, value, path, errors)
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return None if value is None else validate_value(get_args(hint)[0], value, path, errors)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            errors.append(format_unknown_name(f'{path} = {value!r}', str(value), get_args(hint), 'allowed'))
        return value
    value_type, constraint = get_args(hint)
    value = float(value) if value_type is float and type(value) is int else value
    if type(value) is not value_type or not constraint.is_satisfied(value):
        errors.append(f'{path} is {value!r}; it must be {constraint.description}')
    return value


@functools.lru_cache(maxsize=256)
def get_field_hints(dataclass_type: type) -> dict[str, Any]:
    """Return the type hints of the fields of a dataclass, by name."""
    hints = get_type_hints(dataclass_type, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(dataclass_type)}


def format_unknown_name(
    subject: str, name: str, allowed: Iterable[str], label: str = 'fields here', suggestion: str | None = None
) -> str:
    """Format the message about an unknown name, with a suggestion and the allowed names.

    Of more than MAX_LISTED_NAMES allowed names, the message has the most similar ones and the number of the others.

    Args:
        subject: What is unknown, as the message begins.
        name: The unknown name, for which the closest allowed name is suggested.
        allowed: The allowed names.
        label: Label of the allowed names.
        suggestion: The name to suggest; None to search for the closest one in `allowed`.
    """
    allowed = list(allowed)
    suggestion = suggestion or next(iter(difflib.get_close_matches(name, allowed, 1)), None)
    listed = allowed
    if len(allowed) > MAX_LISTED_NAMES:
        similar = difflib.get_close_matches(name, allowed, 5, cutoff=0.3) or allowed[:5]
        listed = [*similar, f'and {len(allowed) - len(similar)} more']
    return (
        f'{subject} is unknown{f"; did you mean {suggestion}?" if suggestion else ""} ({label}: {", ".join(listed)})'
    )
