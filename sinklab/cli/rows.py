"""List the rows of config files: what each changes, and its published numbers with their source.

The exit code is 1 if a row cannot be trained.

Values are those at the size of --size, or at the size that a file sets itself.

example:
  sinklab rows --config=configs/quickstart.py
  sinklab rows --config=configs/optimization.py --size=quickstart
"""

import argparse
import json
import sys
from typing import Any

from sinklab.cli.train import add_size_argument
from sinklab.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        help='only the rows of this config file, which may be your own, or one of them '
        '(default: all files of configs/)',
    )
    add_size_argument(parser)
    parser.add_argument('--json', action='store_true', help='print the rows as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    if extra_args:
        raise UserError(f'{extra_args[0]} is unknown; see sinklab rows --help')
    from sinklab.cli.config_flags import list_config_files, load_config_module, split_config_path

    tables = {}
    for config_path in list_config_files() if args.config is None else [args.config]:
        file, row_name = split_config_path(config_path)
        module = load_config_module(file)
        if file_rows := select_rows(file, row_name, args.size, module):
            tables[file] = [row | check_row(row, args.size, module) for row in file_rows]
    if not tables:
        raise UserError(f'--config={args.config} has no rows; sinklab rows lists the files that have rows')
    all_rows = [row for table in tables.values() for row in table]
    refused_rows = [row for row in all_rows if 'refused' in row]
    if args.json:
        print(json.dumps(all_rows, indent=2, allow_nan=False))
    else:
        print_rows(tables)
    for row in refused_rows:
        message = f'{row["config"]}:{row["row"]} is refused: {row["refused"]}'
        print(f'sinklab rows: {message}', file=sys.stderr)
    return 1 if refused_rows else 0


def select_rows(file: str, row_name: str, size: str | None, module: Any) -> list[dict]:
    """Return the row of this name, or all rows of the file for an empty name.

    Raises:
        UserError: The file has no row of this name.
    """
    from sinklab.cli.config_flags import build_config, find_row_key, get_row_info, load_rows, try_build_config

    if not row_name:
        return list(load_rows(file, size, module).values())
    config_path = f'{file}:{row_name}'
    if find_row_key(module, row_name) not in getattr(module, 'ROWS', {}):
        build_config(module, config_path, row_name, size)  # a file without ROWS may build rows of any name
    return [get_row_info(module, file, row_name, try_build_config(module, config_path, size))]


def check_row(row: dict, size: str | None, module: Any) -> dict:
    """Check whether a row can be trained.

    Args:
        row: The row, as `load_rows` returns it.
        size: The size; None: the default size of the config file.
        module: The module of the config file.

    Returns:
        `size`; `equals_baseline`, whether the row equals its baseline at this size; `not_measured`, the names of
        published numbers that nothing here measures, if there are any; and, if the row is invalid, `refused`, the
        error message that `train` would give.
    """
    from sinklab.cli.config_flags import is_baseline, load_spec
    from sinklab.configs.sources import NOT_MEASURED

    config_path = f'{row["config"]}:{row["row"]}'
    names = [name for name in row['published'] if name in NOT_MEASURED]
    checks = dict(not_measured=names) if names else {}
    try:
        _, row_info = load_spec(config_path, [], size, module)
    except UserError as error:
        return checks | dict(size=size, equals_baseline=False, refused=str(error))
    is_equal = is_baseline(module, config_path, row_info['size'])
    return checks | dict(size=row_info['size'], equals_baseline=is_equal)


def print_rows(tables: dict[str, list[dict]]) -> None:
    from sinklab.cli import terminal
    from sinklab.report.sweep_table import format_published

    console = terminal.make_console(width=100)
    for file, rows in tables.items():
        sizes = dict.fromkeys(row['size'] for row in rows if row['size'])
        title = f'{file} at size {", ".join(sizes)}' if sizes else file
        lines = []
        for row in rows:
            style = 'red' if 'refused' in row else ''
            changes = format_diff(row['diff']) + (
                ', as the baseline' if row['diff'] and row['equals_baseline'] else ''
            )
            texts = row['row'], changes, format_published(row['published'])
            source = terminal.make_multiline_cell(row['source'], row.get('note'))
            lines.append([*(terminal.make_cell(text, style) for text in texts), source])
        headings = 'row', 'changes', 'published', 'source'
        terminal.print_table(
            console, headings, lines, wrap_columns=headings, title=terminal.make_cell(title), title_justify='left'
        )
        console.print('')


def format_diff(diff: dict) -> str:
    """Format a diff, with only the last part of each field name."""
    texts = (f'{value:.4g}' if isinstance(value, float) else str(value) for value in diff.values())
    return ', '.join(f'{path.rpartition(".")[2]}={value}' for path, value in zip(diff, texts, strict=True)) or '-'
