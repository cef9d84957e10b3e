"""List the rows of config files: what each changes, and its published numbers with their source.

The exit code is 1 if a row cannot be trained.

Values are those at the size of --size, or at the size that a file sets itself.

example:
  sinklab rows --config=configs/quickstart.py
  sinklab rows --config=configs/optimization.py --size=quickstart
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

from sinklab.cli import config_flags, terminal
from sinklab.config.differences import flatten_dict
from sinklab.configs.publications import NOT_MEASURED
from sinklab.errors import UserError
from sinklab.report.sweep_table import format_published


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config', metavar='FILE[:ROW]', help='only the rows of this file, or one of them (default: all of configs/)'
    )
    config_flags.add_size_argument(parser)
    parser.add_argument('--json', action='store_true', help='print the rows as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    tables = {}
    for config_path in [args.config] if args.config else config_flags.list_config_files():
        file, row_name = config_flags.split_config_path(config_path)
        module = config_flags.load_config_module(file)
        names = list(getattr(module, 'ROWS', {}))
        if row_name and row_name not in names:
            config_flags.build_config(module, config_path, args.size)  # raises UserError, with the names of rows
        if rows := [load_row(file, name, args.size, module) for name in names if row_name in ('', None, name)]:
            tables[file] = rows
    if not tables:
        raise UserError(f'--config={args.config} has no rows; sinklab rows lists the files that have rows')
    all_rows = [row for rows in tables.values() for row in rows]
    if args.json:
        print(json.dumps(all_rows, indent=2, allow_nan=False))
    else:
        print_rows(tables)
    refused_rows = [row for row in all_rows if 'refused' in row]
    for row in refused_rows:
        print(f'sinklab rows: {row["config"]}:{row["row"]} is refused: {row["refused"]}', file=sys.stderr)
    return 1 if refused_rows else 0


def load_row(file: str, row: str, size: str | None, module: Any) -> dict:
    """Load a row, and check whether it can be trained.

    Returns:
        The content of row.json, with `equals_baseline`, whether the row equals its baseline at this size;
        `not_measured`, the names of published numbers that nothing here measures, if there are any; and, if the row
        is invalid, `refused`, the error message that `train` would give.
    """
    try:
        spec, row_info = config_flags.load_spec(f'{file}:{row}', [], size, module)
        baseline = config_flags.get_baseline(module, row_info['size'])
        row_info['equals_baseline'] = flatten_dict(dataclasses.asdict(spec)) == baseline
    except UserError as error:
        row_info = config_flags.get_row_info(module, file, row, {})
        row_info |= dict(size=size, equals_baseline=False, refused=str(error))
    row_info.pop('overrides', None)
    names = [name for name in row_info['published'] if name in NOT_MEASURED]
    return row_info | (dict(not_measured=names) if names else {})


def print_rows(tables: dict[str, list[dict]]) -> None:
    console = terminal.make_console(width=100)
    for file, rows in tables.items():
        sizes = dict.fromkeys(row['size'] for row in rows if row['size'])
        title = f'{file} at size {", ".join(sizes)}' if sizes else file
        lines = []
        for row in rows:
            note = ', as the baseline' if row['diff'] and row['equals_baseline'] else ''
            changes = f'{format_diff(row["diff"])}{note}'
            source = '\n'.join(filter(None, [row['source'], row.get('note')]))
            lines.append([row['row'], changes, format_published(row['published']), source])
        headings = 'row', 'changes', 'published', 'source'
        console.print(title)
        terminal.print_table(console, headings, lines, wrap_columns=headings)
        console.print('')


def format_diff(diff: dict) -> str:
    """Format a diff, with only the last part of each field name."""
    texts = (f'{value:.4g}' if isinstance(value, float) else str(value) for value in diff.values())
    return ', '.join(f'{path.rpartition(".")[2]}={value}' for path, value in zip(diff, texts, strict=True)) or '-'
