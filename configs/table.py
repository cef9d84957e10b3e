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
from configs.sizes import MIN_VALUES, REFERENCE_FIELDS, SIZES


@dataclasses.dataclass(frozen=True)
class FactorOfSize:
    """A factor of what a size has in this field, or in another one."""

    factor: float
    of: str | None = None

    def resolve(self, path, unsized_config, sized_config):
        """Return the value at a size.

        Args:
            unsized_config: the config without the size.
            sized_config: the config of the size.
        """
        field = self.of or path
        check_field(field, sized_config)
        number = get_field(sized_config, field)
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
class SizeScaledValue:
    """A value at the paper's size, which has the same ratio to the default at every other size."""

    value: object

    def resolve(self, path, unsized_config, sized_config):
        """Return the value at a size. For the arguments see Multiple.resolve."""
        reference_field = REFERENCE_FIELDS.get(path, path)
        scaled = scale_number(
            self.value, get_field(unsized_config, reference_field), get_field(sized_config, reference_field)
        )
        return max(scaled, MIN_VALUES[path]) if path in MIN_VALUES else scaled


def scale(path: str, factor: float, of: str | None = None) -> dict[str, FactorOfSize]:
    """Make the part of a diff that multiplies what a size has.

    Args:
        path: the field that is set.
        factor: a number. Of a field with a whole number the product is rounded to the nearest whole number, odd or
            even, and a positive product to at least 1. scale_with_size() rounds in another way.
        of: the field that is multiplied, where that is not the one that is set.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ValueError(f'scale({path!r}, {factor!r}): the factor must be a number, as in scale({path!r}, 3)')
    return {path: FactorOfSize(factor, of)}


def scale_with_size(diff: dict[str, object]) -> dict[str, SizeScaledValue]:
    """Make a diff of values at the paper's size, each of which has the same ratio to the default at every size.

    At the paper's size values are trained as they are written. At another size:

    - Whole numbers from 3 on are rounded to the nearest even number, because widths have to be even; positive ones
      below 3 to the nearest whole number, at least 1. A 0 stays 0. scale() rounds in another way.
    - A field in REFERENCE_FIELDS of configs/sizes.py scales with its reference field: a window and a block with
      data.length, model.columns.key_width with model.head_width, and model.kv_heads with model.heads. Windows and
      blocks are at least 2 (MIN_VALUES).
    - Texts, flags and None stay as they are written, and so do numbers whose default is 0 or None.

    Args:
        diff: values by the names of their fields.
    """
    return {path: SizeScaledValue(value) for path, value in diff.items()}


def table(rows, base=None, sizes=SIZES, default_size='paper'):
    """Make get_config(row, size) for rows {name: {diff, published, source}}, each a diff from the default.

    `base` and a size stand between the default and a row. get_config.baseline(size) is the config without a row,
    and get_config.sizes the names of the sizes.
    """

    def baseline(size=default_size):
        check_name(size, sizes, 'size')
        return make_config((base or {}) | sizes[size])

    def get_config(row=None, size=default_size):
        check_name(row, rows, 'row')
        unsized_config, sized_config, config = make_config(base or {}), baseline(size), baseline(size)
        for path, value in rows[row]['diff'].items():
            check_field(path, sized_config)
            is_size_dependent = isinstance(value, FactorOfSize | SizeScaledValue)
            set_field(config, path, value.resolve(path, unsized_config, sized_config) if is_size_dependent else value)
        return config

    get_config.baseline, get_config.sizes = baseline, tuple(sizes)
    return get_config


def make_config(values):
    """Return the default with some values set."""
    config = default.get_config()
    for path, value in values.items():
        set_field(config, path, value)
    return config


def scale_number(value, paper_reference, size_reference):
    """Return a number at another size: as many times what stands there as it was times the paper's.

    Whole numbers from 3 on are rounded to even ones, as widths have to be.
    """
    if (
        size_reference == paper_reference
        or not paper_reference
        or any(isinstance(x, bool | str | None) for x in (value, paper_reference, size_reference))
    ):
        return value
    exact = value * size_reference / paper_reference
    if isinstance(value, float):
        return exact
    if exact <= 0:
        return round(exact)
    return max(1, round(exact) if exact < 3 else 2 * round(exact / 2))


def check_name(name, allowed, kind):
    if name not in allowed:
        problem = f'no {kind} was named' if name is None else f'there is no {kind} {name!r}'
        raise ValueError(f'{problem}{format_suggestion(str(name), allowed)} ({kind}s: {", ".join(allowed)})')


def set_field(config, path, value):
    check_field(path, config)
    try:
        config.update_from_flattened_dict({path: value})
    except TypeError as error:
        raise ValueError(f'{path} is {value!r}, where a value is like {get_field(config, path)!r}') from error


def check_field(path, config):
    """Raise ValueError unless a path names a field of a config, and no section of it."""
    value = config
    for name in path.split('.'):
        if not hasattr(value, 'items') or name not in value:
            break
        value = value[name]
    else:
        if not hasattr(value, 'items'):
            return
    raise ValueError(f'{path} is no field of configs/default.py{format_suggestion(path, list(list_fields(config)))}')


def get_field(config, path):
    for name in path.split('.'):
        config = config[name]
    return config


def list_fields(config, prefix=''):
    """The dotted names of all fields."""
    for name, value in config.items():
        yield from list_fields(value, f'{prefix}{name}.') if hasattr(value, 'items') else [f'{prefix}{name}']


def format_suggestion(name, names):
    match = find_closest_name(name, names)
    return f'; did you mean {match}?' if match else ''


def find_closest_name(name, names):
    """Return the name that is most like a given one, as a whole and in its last component; None if none is."""
    full_matcher = difflib.SequenceMatcher(b=name)
    suffix_matcher = difflib.SequenceMatcher(b=name.rpartition('.')[2])

    def compute_similarity(other):
        full_matcher.set_seq1(other)
        suffix_matcher.set_seq1(other.rpartition('.')[2])
        return full_matcher.ratio(), suffix_matcher.ratio()

    ratios = {other: compute_similarity(other) for other in names}
    total_ratios = {
        other: sum(ratio_pair)
        for other, ratio_pair in ratios.items()
        if ratio_pair[1] >= 0.7 or min(ratio_pair) >= 0.6
    }
    return max(total_ratios, key=total_ratios.get, default=None)
