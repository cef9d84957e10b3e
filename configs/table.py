"""Tables of rows, made by get_config = table(ROWS).

A row is a diff from the default, with its published numbers and their source. A value in a row is the same at every
size, unless the row marks it as depending on the size:

    diff={'optimizer.warmup_steps': 400}                    400 steps at every size
    diff=scale('optimizer.weight_decay', 3)                 three times the value of the size
    diff=scale('model.mask.window', 1 / 4, of='data.length')    a quarter of data.length
    diff=scale_with_size({'optimizer.weight_decay': 0.3})   0.3 at the paper's size; the same ratio to the
                                                                default at other sizes
"""

import dataclasses
import difflib

from sinklab.configs import default
from sinklab.configs.sizes import MIN_VALUES, REFERENCE_FIELDS, SIZES


@dataclasses.dataclass(frozen=True)
class FactorOfSize:
    """`factor` times the value that the field `of` has at a size."""

    factor: float
    of: str

    def __str__(self):
        return f'{self.factor} x {self.of}'

    def resolve(self, path, unsized_config, sized_config):
        """Return the value of the field `path` at a size."""
        number = get_field(sized_config, self.of)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(
                f'scale({path!r}, {self.factor}): {self.of} is {number!r} at this size, which is not a number; '
                'give a value, or the field to multiply: scale(..., of=FIELD)'
            )
        exact = number * self.factor
        if isinstance(number, float):
            return float(exact)
        return max(1, round(exact)) if exact > 0 else round(exact)


@dataclasses.dataclass(frozen=True)
class SizeScaledValue:
    """A value at the paper's size that keeps its ratio to the default at other sizes."""

    value: object

    def __str__(self):
        return str(self.value)

    def resolve(self, path, unsized_config, sized_config):
        """Return the value of the field `path` at a size."""
        reference = REFERENCE_FIELDS.get(path, path)
        scaled = scale_number(self.value, get_field(unsized_config, reference), get_field(sized_config, reference))
        return max(scaled, MIN_VALUES[path]) if path in MIN_VALUES else scaled


def make_row(diff, source, sink=None, loss=None, note=None, **published):
    """Make a row.

    Args:
        diff: the values that the row changes, by the names of their fields.
        source: where its numbers are published.
        sink: the published Sink_1, in percent.
        loss: the published validation loss.
        note: what a reader should know; a row without published numbers needs one.
        **published: other published numbers, by name.
    """
    published |= {name: x for name, x in (('sink/1', sink), ('valid/loss', loss)) if x is not None}
    row = dict(diff=diff, published=published, source=source)
    return row if note is None else row | dict(note=note)


def scale(path: str, factor: float, of: str | None = None) -> dict[str, FactorOfSize]:
    """Make the part of a diff that multiplies the value of a size.

    Args:
        path: the field that is set.
        factor: a number. For integer fields the product is rounded to the nearest integer, odd or even, and a
            positive product to at least 1. scale_with_size() rounds differently.
        of: the field that is multiplied; None for the field that is set.

    Raises:
        ValueError: the factor is not a number.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ValueError(f'scale({path!r}, {factor!r}): the factor must be a number, as in scale({path!r}, 3)')
    return {path: FactorOfSize(factor, of or path)}


def scale_with_size(diff: dict[str, object]) -> dict[str, SizeScaledValue]:
    """Make a diff of values at the paper's size that keep their ratios to the default at other sizes.

    At the paper's size the values are those of the diff. At another size:

    - Integer values are scaled and rounded. A scaled value of 3 or more is rounded to the nearest even number,
      because widths must be even. A positive one below 3 is rounded to the nearest integer, at least 1. A 0 stays 0.
      scale() rounds differently.
    - A field in REFERENCE_FIELDS of configs/sizes.py scales with its reference field: a window and a block with
      data.length, model.learned_kv.key_width with model.head_width, and model.kv_heads with model.heads. Windows and
      blocks are at least 2 (MIN_VALUES).
    - Strings, flags and None do not change. Numbers whose default is 0 or None do not change.

    Args:
        diff: values by the names of their fields.
    """
    return {path: SizeScaledValue(value) for path, value in diff.items()}


def table(rows, base=None, sizes=SIZES, default_size='paper'):
    """Make the function get_config(row, size) of a config file.

    Values are applied in this order: the default, `base`, the size, the diff of the row.

    Args:
        rows: {name of a row: {diff, published, source}}.
        base: values by the names of their fields; None for no values.
        sizes: {name of a size: values}.
        default_size: the size of get_config without a size.

    Returns:
        get_config, which raises ValueError for unknown rows, sizes and fields. Its attribute `baseline` is a function
        that returns the config of a size without a row, and `sizes` is the tuple of the names of the sizes.
    """

    def baseline(size=default_size):
        check_name(size, sizes, 'size')
        return make_config((base or {}) | sizes[size])

    def get_config(row=None, size=default_size):
        check_name(row, rows, 'row')
        config, unsized_config = baseline(size), make_config(base or {})
        values = dict(rows[row]['diff'])
        for path, value in values.items():
            if isinstance(value, FactorOfSize | SizeScaledValue):
                values[path] = value.resolve(path, unsized_config, config)
        for path, value in values.items():
            set_field(config, path, value)
        return config

    get_config.baseline = baseline
    get_config.sizes = tuple(sizes)
    return get_config


def make_config(values):
    """Return the default config with some values replaced."""
    config = default.get_config()
    for path, value in values.items():
        set_field(config, path, value)
    return config


def scale_number(value, paper_reference, size_reference):
    """Scale a number of the paper's size by the ratio of a reference value at another size to the paper's.

    An integer is rounded to the nearest even number if the scaled value is 3 or more, because widths must be even.
    The number does not change if the reference is 0, or if one of the three is a flag, a string or None.
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
        problem = f'no {kind} is given' if name is None else f'there is no {kind} {name!r}'
        if name is None and kind == 'row' and allowed:
            problem += f'; append one to the file, as in FILE.py:{next(iter(allowed))}'
        raise ValueError(f'{problem}{format_suggestion(str(name), allowed)} ({kind}s: {", ".join(allowed)})')


def set_field(config, path, value):
    default_value = get_field(config, path)
    try:
        config.update_from_flattened_dict({path: value})
    except TypeError as error:
        raise ValueError(f'{path} is {value!r}; give a value like {default_value!r}') from error


def get_field(config, path):
    if path not in list_fields(config):
        suggestion = format_suggestion(path, list(list_fields(config)))
        raise ValueError(f'{path} is not a field of configs/default.py{suggestion}')
    for name in path.split('.'):
        config = config[name]
    return config


def list_fields(config, prefix=''):
    """Yield the dotted names of all fields."""
    for name, value in config.items():
        yield from list_fields(value, f'{prefix}{name}.') if hasattr(value, 'items') else [f'{prefix}{name}']


def format_suggestion(name, names):
    match = find_closest_name(name, names)
    return f'; did you mean {match}?' if match else ''


def find_closest_name(name, names):
    """Return the most similar name, by the whole name and by its last component; None if none is similar."""

    def compare(other):
        pairs = (other, name), (other.rpartition('.')[2], name.rpartition('.')[2])
        return [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs]

    ratios = {other: compare(other) for other in names}
    similar = {other: sum(pair) for other, pair in ratios.items() if pair[1] >= 0.7 or min(pair) >= 0.6}
    return max(similar, key=similar.get, default=None)
