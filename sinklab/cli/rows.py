"""List the rows of config files: what each changes, and its published numbers with their source.

The exit code is 1 if a row cannot be trained.

Values are those that are trained at the size: that of --size, or the one that a file has by itself.

example:
  sinklab rows --config=configs/quickstart.py
  sinklab rows --config=configs/optimization.py --size=quickstart
"""

import argparse
import json
import sys
from typing import Any

from sinklab.cli.train import size_argument
from sinklab.escape import escape_control
from sinklab.record import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        metavar='FILE',
        help='only the rows of this config file, which may be your own (default: all files of configs/)',
    )
    size_argument(verb)
    verb.add_argument('--json', action='store_true', help='print the rows as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab rows --help')
    from sinklab.cli.config import config_files, module_of, rows

    tables = {}
    for file in config_files() if given.config is None else [given.config]:
        module = module_of(file)
        if found := rows(file, given.size, module):
            tables[file] = [row | checked(row, given.size, module) for row in found.values()]
    if not tables:
        raise Refusal(f'--config={given.config} has no rows; sinklab rows lists the files that have')
    listed = [row for table in tables.values() for row in table]
    wrong = [row for row in listed if 'refused' in row]
    if given.json:
        print(json.dumps(listed, indent=2, allow_nan=False))
    else:
        show(tables)
    for row in wrong:
        words = f'{row["config"]}:{row["row"]} is refused: {row["refused"]}'
        print(f'sinklab rows: {escape_control(words)}', file=sys.stderr)
    return 1 if wrong else 0


def checked(row: dict, size: str | None, module: Any) -> dict:
    """Return the size of a row, whether it is equal to its baseline there, and why `train` would refuse it, if so.

    Args:
        module: of the row's config file.
    """
    from sinklab.cli.config import equals_baseline, load

    given = f'{row["config"]}:{row["row"]}'
    try:
        _, about = load(given, [], size, module)
    except Refusal as error:
        return dict(size=size, equals_baseline=False, refused=str(error))
    return dict(size=about['size'], equals_baseline=equals_baseline(module, given, about['size']))


def show(tables: dict[str, list[dict]]) -> None:
    from rich.table import Table

    from sinklab.cli import terminal
    from sinklab.report.sweep import published_text

    console = terminal.console(width=100)
    for file, rows in tables.items():
        sizes = dict.fromkeys(row['size'] for row in rows if row['size'])
        title = f'{file} at size {", ".join(sizes)}' if sizes else file
        table = Table(box=None, title=terminal.cell(title), title_justify='left')
        for heading in ('row', 'changes', 'published', 'source'):
            table.add_column(heading, overflow='fold', no_wrap=heading == 'row' and names_fit(rows, console.width))
        for row in rows:
            source = terminal.lines(row['source'], row.get('note'))
            changes = short(row['diff']) + (', as the baseline' if row['diff'] and row['equals_baseline'] else '')
            cells = map(terminal.cell, (row['row'], changes, published_text(row['published'])))
            table.add_row(*cells, source, style='red' if 'refused' in row else None)
        console.print(table, '')


def names_fit(rows: list[dict], width: int) -> bool:
    """Return whether names of rows leave most of a line to what is said of them."""
    return max(len(row['row']) for row in rows) <= width // 3


def short(diff: dict) -> str:
    """A diff by the last names of its fields."""
    said = (f'{value:.4g}' if isinstance(value, float) else str(value) for value in diff.values())
    return ', '.join(f'{path.rpartition(".")[2]}={value}' for path, value in zip(diff, said, strict=True)) or '-'
