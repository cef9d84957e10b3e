"""table(rows) -> get_config(row). A row is the default with a few values changed, and where its numbers are from."""

import difflib

from configs import default


def table(rows, base=None):
    """get_config for rows {name: {diff, published, source}}, each a diff from the default over `base`."""

    def get_config(row=None):
        if row not in rows:
            given = 'no row was named' if row is None else f'there is no row {row!r}'
            raise ValueError(f'{given}{suggestion(str(row), rows)} (rows: {", ".join(rows)})')
        config = default.get_config()
        for path, value in {**(base or {}), **rows[row]['diff']}.items():
            assign(config, path, value)
        return config

    return get_config


def assign(config, path, value):
    fields = list(flat(config))
    if path not in fields:
        raise ValueError(f'{path} is no field of configs/default.py{suggestion(path, fields)}')
    config.update_from_flattened_dict({path: value})


def flat(config, at=''):
    """The dotted names of all fields."""
    for name, value in config.items():
        yield from flat(value, f'{at}{name}.') if hasattr(value, 'items') else [f'{at}{name}']


def suggestion(name, names):
    near = difflib.get_close_matches(name, names, 1)
    return f'; did you mean {near[0]}?' if near else ''
