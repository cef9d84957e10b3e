"""Tables of rows: get_config = table(ROWS). A row is a few values beside the default, and where its numbers are from.

A value in a row is trained as it is written, at every size. What follows the size is marked in the row:

    diff={'optimizer.warmup_steps': 400}                    400 steps at every size
    diff=scale('optimizer.weight_decay', 3)                 three times what the size has
    diff=scale('model.mask.window', 1 / 4, of='data.length')    a quarter of a window
    diff=scale_with_size({'optimizer.weight_decay': 0.3})   0.3 at the paper's size, elsewhere by the same factor
"""

import dataclasses
import difflib

from configs import default
from configs.sizes import LEAST, PART_OF, SIZES


@dataclasses.dataclass(frozen=True)
class Multiple:
    """A factor of what a size has in this field, or in another one."""

    factor: float
    of: str | None = None

    def resolve(self, path, plain, here):
        """Return the value at a size.

        Args:
            plain: the config without the size.
            here: the config of the size.
        """
        field = self.of or path
        check_field(here, field)
        number = reading(here, field)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(
                f'scale({path!r}, {self.factor}): {field} is {number!r} at this size, which is no number; '
                'write a value, or name the field that it is a part of: scale(..., of=FIELD)'
            )
        exact = number * self.factor
        if isinstance(number, float):
            return float(exact)
        return max(1, round(exact)) if exact > 0 else round(exact)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A value at the paper's size, which has the same ratio to the default at every other size."""

    value: object

    def resolve(self, path, plain, here):
        """Return the value at a size. For the arguments see Multiple.resolve."""
        follows = PART_OF.get(path, path)
        found = keep_ratio(self.value, reading(plain, follows), reading(here, follows))
        return max(found, LEAST[path]) if path in LEAST else found


def scale(path: str, factor: float, of: str | None = None) -> dict[str, Multiple]:
    """Make the part of a diff that multiplies what a size has.

    Args:
        path: the field that is set.
        factor: a number. Of a field with a whole number the product is rounded to the nearest whole number, odd or
            even, and a positive product to at least 1. scale_with_size() rounds in another way.
        of: the field that is multiplied, where that is not the one that is set.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ValueError(f'scale({path!r}, {factor!r}): the factor must be a number, as in scale({path!r}, 3)')
    return {path: Multiple(factor, of)}


def scale_with_size(diff: dict[str, object]) -> dict[str, Scaled]:
    """Make a diff of values at the paper's size, each of which has the same ratio to the default at every size.

    At the paper's size values are trained as they are written. At another size:

    - Whole numbers from 3 on are rounded to the nearest even number, because widths have to be even; positive ones
      below 3 to the nearest whole number, at least 1. A 0 stays 0. scale() rounds in another way.
    - A field of PART_OF in configs/sizes.py follows the field that it is a part of: a window and a block follow
      data.length, model.columns.key_width follows model.head_width, and model.kv_heads follows model.heads. Windows
      and blocks are at least 2 (LEAST).
    - Texts, flags and None stay as they are written, and so do numbers whose default is 0 or None.

    Args:
        diff: values by the names of their fields.
    """
    return {path: Scaled(value) for path, value in diff.items()}


def table(rows, base=None, sizes=SIZES, usual='paper'):
    """Make get_config(row, size) for rows {name: {diff, published, source}}, each a diff from the default.

    `base` and a size stand between the default and a row. get_config.baseline(size) is the config without a row,
    and get_config.sizes the names of the sizes.
    """

    def baseline(size=usual):
        named(size, sizes, 'size')
        return made((base or {}) | sizes[size])

    def get_config(row=None, size=usual):
        named(row, rows, 'row')
        plain, here, config = made(base or {}), baseline(size), baseline(size)
        for path, value in rows[row]['diff'].items():
            if isinstance(value, Multiple | Scaled):
                check_field(here, path)
                value = value.resolve(path, plain, here)
            assign(config, path, value)
        return config

    get_config.baseline, get_config.sizes = baseline, tuple(sizes)
    return get_config


def made(values):
    """Return the default with some values set."""
    config = default.get_config()
    for path, value in values.items():
        assign(config, path, value)
    return config


def keep_ratio(value, paper, here):
    """Return a number at another size: as many times what stands there as it was times the paper's.

    Whole numbers from 3 on are rounded to even ones, as widths have to be.
    """
    if here == paper or not paper or any(isinstance(x, bool | str | None) for x in (value, paper, here)):
        return value
    exact = value * here / paper
    if isinstance(value, float):
        return exact
    if exact <= 0:
        return round(exact)
    return max(1, round(exact) if exact < 3 else 2 * round(exact / 2))


def named(name, menu, kind):
    if name not in menu:
        given = f'no {kind} was named' if name is None else f'there is no {kind} {name!r}'
        raise ValueError(f'{given}{suggestion(str(name), menu)} ({kind}s: {", ".join(menu)})')


def assign(config, path, value):
    check_field(config, path)
    try:
        config.update_from_flattened_dict({path: value})
    except TypeError as error:
        raise ValueError(f'{path} is {value!r}, where a value is like {reading(config, path)!r}') from error


def check_field(config, path):
    """Raise ValueError if a path does not name a field of a config; the name of a section is no field."""
    value = config
    for name in path.split('.'):
        if not hasattr(value, 'items') or name not in value:
            break
        value = value[name]
    else:
        if not hasattr(value, 'items'):
            return
    raise ValueError(f'{path} is no field of configs/default.py{suggestion(path, list(flat(config)))}')


def reading(config, path):
    for name in path.split('.'):
        config = config[name]
    return config


def flat(config, at=''):
    """The dotted names of all fields."""
    for name, value in config.items():
        yield from flat(value, f'{at}{name}.') if hasattr(value, 'items') else [f'{at}{name}']


def suggestion(name, names):
    near = closest(name, names)
    return f'; did you mean {near}?' if near else ''


def closest(name, names):
    """Return the name that is most like a given one, as a whole and in its last component; None if none is."""
    whole = difflib.SequenceMatcher(b=name)
    last = difflib.SequenceMatcher(b=name.rpartition('.')[2])

    def likeness(other):
        whole.set_seq1(other)
        last.set_seq1(other.rpartition('.')[2])
        return whole.ratio(), last.ratio()

    rated = {other: likeness(other) for other in names}
    alike = {other: sum(both) for other, both in rated.items() if both[1] >= 0.7 or min(both) >= 0.6}
    return max(alike, key=alike.get, default=None)
