"""table(rows) -> get_config(row, size). A row is a few values beside the default, and where its numbers are from."""

import difflib

from configs import default
from configs.sizes import LEAST, PART_OF, SIZES


def table(rows, base=None, sizes=SIZES, usual='paper'):
    """get_config for rows {name: {diff, published, source}}, each a diff from the default over `base` and a size."""

    def get_config(row=None, size=usual):
        named(row, rows, 'row')
        named(size, sizes, 'size')
        plain, config = default.get_config(), default.get_config()
        for path, value in (base or {}).items():
            assign(plain, path, value)
        for path, value in {**(base or {}), **sizes[size]}.items():
            assign(config, path, value)
        before = {name: reading(config, name) for name in flat(config)}
        diff = rows[row]['diff']
        for path, value in diff.items():
            known(path, before)
            follows = PART_OF.get(path, path)
            # Numbers of another optimizer are no multiples of this one's.
            own = path.startswith('optimizer.') and 'optimizer.name' in diff
            here = value if own else scaled(value, reading(plain, follows), before[follows])
            assign(config, path, max(here, LEAST[path]) if path in LEAST else here)
        return config

    return get_config


def scaled(value, paper, here):
    """A row's number at another size: as many times what stands there as it was times the paper's.

    Whole numbers from 3 on are rounded to even ones, as widths have to be.
    """
    if here == paper or not paper or any(isinstance(x, bool | str | None) for x in (value, paper, here)):
        return value
    exact = value * here / paper
    if isinstance(value, float):
        return exact
    return max(1, round(exact) if exact < 3 else 2 * round(exact / 2))


def named(name, menu, kind):
    if name not in menu:
        given = f'no {kind} was named' if name is None else f'there is no {kind} {name!r}'
        raise ValueError(f'{given}{suggestion(str(name), menu)} ({kind}s: {", ".join(menu)})')


def assign(config, path, value):
    known(path, list(flat(config)))
    try:
        config.update_from_flattened_dict({path: value})
    except TypeError as error:
        raise ValueError(f'{path} is {value!r}, where a value is like {reading(config, path)!r}') from error


def known(path, fields):
    if path not in fields:
        raise ValueError(f'{path} is no field of configs/default.py{suggestion(path, fields)}')


def reading(config, path):
    for name in path.split('.'):
        config = config[name]
    return config


def flat(config, at=''):
    """The dotted names of all fields."""
    for name, value in config.items():
        yield from flat(value, f'{at}{name}.') if hasattr(value, 'items') else [f'{at}{name}']


def suggestion(name, names):
    near = difflib.get_close_matches(name, names, 1)
    return f'; did you mean {near[0]}?' if near else ''
