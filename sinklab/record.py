"""Frozen records read from nested mappings, each field checked against its type.

A field's type is its whole rule: a `Literal` is a menu, an `Annotated` carries its domain.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class Refusal(ValueError):
    """What was asked cannot be done. The message says what was given, what is allowed and what to do."""


@dataclasses.dataclass(frozen=True)
class Domain:
    words: str
    holds: Callable[[Any], bool]


# Steps and places in arrays are int32.
Count = Annotated[int, Domain('a whole number of at least 1, below 2^31', lambda x: 1 <= x < 2**31)]
Natural = Annotated[int, Domain('a whole number of at least 0, below 2^31', lambda x: 0 <= x < 2**31)]
Flag = Annotated[bool, Domain('True or False', lambda x: True)]
Finite = Annotated[float, Domain('a finite number', math.isfinite)]
Positive = Annotated[float, Domain('a finite number above 0', lambda x: 0 < x < math.inf)]
Nonnegative = Annotated[float, Domain('a finite number of at least 0', lambda x: 0 <= x < math.inf)]
Fraction = Annotated[float, Domain('a number between 0 and 1, both excluded', lambda x: 0 < x < 1)]
Share = Annotated[float, Domain('a number above 0 and at most 1', lambda x: 0 < x <= 1)]
Part = Annotated[float, Domain('a number from 0 to 1', lambda x: 0 <= x <= 1)]
Momentum = Annotated[float, Domain('a number from 0 up to, but not, 1', lambda x: 0 <= x < 1)]
Seed = Annotated[int, Domain('a whole number from 0 to 2^32 - 1', lambda x: 0 <= x < 2**32)]
Text = Annotated[str, Domain('a text that is not empty', bool)]


def record(kind: type, given: Any, at: str) -> Any:
    """Read a nested mapping into a record. `Refusal` names everything that is wrong with its fields."""
    faults: list[str] = []
    found = read_record(kind, given, at, faults)
    refuse_all(faults)
    return found


def refuse_all(faults: Iterable[str]) -> None:
    """Raise one Refusal, of one line, that has every fault; none where there is no fault."""
    different = list(dict.fromkeys(faults))
    if len(different) == 1:
        raise Refusal(different[0])
    if different:
        numbered = '; '.join(f'({number}) {fault}' for number, fault in enumerate(different, 1))
        raise Refusal(f'{len(different)} faults: {numbered}')


def field(hint: Any, given: Any, at: str) -> Any:
    """Read one value by its type, as Refusal says where it is not of that."""
    faults: list[str] = []
    found = read_field(hint, given, at, faults)
    refuse_all(faults)
    return found


def read_record(kind: type, given: Any, at: str, faults: list[str]) -> Any:
    """Read a record, and append what is wrong to `faults`; what is returned is of use only where nothing is."""
    if not isinstance(given, Mapping):
        faults.append(f'{at} is {given!r}; it must hold the fields {", ".join(names(kind))}')
        return None
    faults.extend(unknown(f'{at}.{name}', name, names(kind)) for name in given if name not in names(kind))
    if missing := [name for name in names(kind) if name not in given]:
        listed = ', '.join(f'{at}.{name}' for name in missing)
        verb = 'is' if len(missing) == 1 else 'are'
        faults.append(f'{listed} {verb} missing; start from configs/default.py, which has every field')
    hints = get_type_hints(kind, include_extras=True)
    found = {
        name: read_field(hints[name], given[name], f'{at}.{name}', faults) for name in names(kind) if name in given
    }
    return None if missing else kind(**found)


def read_field(hint: Any, given: Any, at: str, faults: list[str]) -> Any:
    if dataclasses.is_dataclass(hint):
        return read_record(hint, given, at, faults)
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return None if given is None else read_field(get_args(hint)[0], given, at, faults)
    if get_origin(hint) is Literal:
        if given not in get_args(hint):
            faults.append(unknown(f'{at} = {given!r}', str(given), get_args(hint), 'allowed'))
        return given
    kind, domain = get_args(hint)
    value = float(given) if kind is float and type(given) is int else given
    if type(value) is not kind or not domain.holds(value):
        faults.append(f'{at} is {given!r}; it must be {domain.words}')
    return value


def names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def unknown(what: str, name: str, allowed: Iterable[str], label: str = 'fields here', near: str | None = None) -> str:
    """Say that a name is unknown, which one may have been meant, and which there are.

    Args:
        near: the name that may have been meant, where it is not to be looked for among `allowed`.
    """
    allowed = list(allowed)
    near = near or next(iter(difflib.get_close_matches(name, allowed, 1)), None)
    return f'{what} is unknown{f"; did you mean {near}?" if near else ""} ({label}: {", ".join(allowed)})'
