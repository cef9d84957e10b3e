"""table(rows) -> get_config(row): a row is the default with a few values changed, and where they come from."""

import difflib

from configs import default


def table(rows, base=None):
    """get_config for rows {name: {diff, published, source}}, each a diff from the default over `base`."""

    def get_config(row=None):
        if row not in rows:
            near = difflib.get_close_matches(str(row), rows, 1)
            given = 'no row was named' if row is None else f'there is no row {row!r}'
            hint = f'; did you mean {near[0]}?' if near else ''
            raise ValueError(f'{given}{hint} (rows: {", ".join(rows)})')
        config = default.get_config()
        config.update_from_flattened_dict({**(base or {}), **rows[row]['diff']})
        return config

    return get_config
