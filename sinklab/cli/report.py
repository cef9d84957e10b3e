"""report runs as a table, and as one page that needs no network

example:
  sinklab report runs/quickstart/* --png
"""

import argparse
import json
import os
import sys
from pathlib import Path

from sinklab.spec import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('runs', nargs='+', metavar='DIR', help='run folders')
    verb.add_argument('--out', metavar='DIR', help='where report.html goes; without it, beside the runs')
    verb.add_argument('--png', action='store_true', help='write the pictures as PNG files too')
    verb.add_argument('--json', action='store_true', help='print the table as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab report --help')
    from sinklab.report import runs

    found = runs.read(given.runs)
    folder = Path(given.out or os.path.commonpath([Path(path).absolute() for path in given.runs]))
    page = write(folder, found, given.png)
    if given.json:
        print(json.dumps(runs.table(found), indent=2))
    else:
        show(runs.table(found))
    print(f'report: {page}', file=sys.stderr if given.json else sys.stdout)
    return 0


def write(folder: Path, found: list, png: bool) -> Path:
    try:
        from sinklab.report import page, pictures
    except ImportError as error:
        raise Refusal(f'a report needs {error.name}; install it: pip install "sinklab[report]"') from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write(folder / 'report.html', found)
        if png:
            pictures.write(folder, found)
    except OSError as error:
        raise Refusal(f'{folder} cannot be written ({error.strerror}); choose another --out') from error
    return folder / 'report.html'


def show(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table('arm', box=None)
    for name in ('Sink_1', 'mean alpha_1', 'uniform', 'raw row mass', 'valid loss', 'seconds'):
        table.add_column(name, justify='right')
    for row in rows:
        table.add_row(
            row['arm'],
            f'{row["sink/1"]:.1f} %',
            f'{row["alpha/1"]:.3f}',
            f'{row["alpha/floor"]:.3f}',
            f'{row["mass/row"]:.2f}',
            f'{row["valid/loss"]:.3f}',
            f'{row["seconds"]:.0f}',
        )
    Console(highlight=False).print(table)
