"""runs as a table, and as one page that needs no network

example:
  sinklab report runs/quickstart/* --png
"""

import argparse
import glob
import json
import sys
from pathlib import Path

from sinklab.files.place import absolute, common, is_remote, place
from sinklab.record import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('runs', nargs='+', metavar='DIR', help='run folders')
    verb.add_argument('--out', metavar='DIR', help='where report.html goes; without it, where the runs are')
    verb.add_argument('--png', action='store_true', help='write the pictures as PNG files too')
    verb.add_argument('--json', action='store_true', help='print the table as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab report --help')
    from sinklab.report import runs

    paths = [str(path) for one in given.runs for path in matching(one)]
    found = runs.read(paths)
    page = write(place(given.out) if given.out else beside(paths), found, given.png)
    if given.json:
        print(json.dumps(runs.table(found), indent=2, allow_nan=False))
    else:
        show(runs.table(found))
    print(f'report: {page}', file=sys.stderr if given.json else sys.stdout)
    return 0


def matching(given: str) -> list[Path]:
    """The runs in a bucket that a pattern matches, which no shell has looked for; what else is given, as it is."""
    if not (is_remote(given) and glob.has_magic(given)):
        return [place(given)]
    start = given[: min(given.index(sign) for sign in '*?[' if sign in given)].rpartition('/')[0]
    found = [path.parent for path in place(start).glob(f'{given[len(start) + 1 :].rstrip("/")}/config.json')]
    if not found:
        raise Refusal(f'{given} matches no run; give run folders')
    return sorted(found)


def beside(runs: list[str]) -> Path:
    """A single run's own folder, or the innermost one that all of several lie in."""
    paths = [absolute(place(path)) for path in runs]
    return paths[0] if len(paths) == 1 else common([path.parent for path in paths])


def write(folder: Path, found: list, png: bool) -> Path:
    try:
        from sinklab.report import page, pictures
    except ImportError as error:
        raise Refusal(f'a report needs {error.name}; install it: pip install "sinklab[report]"') from error
    try:
        if not is_remote(folder):
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

    from sinklab.report.runs import NUMBERS, cells

    table = Table('arm', box=None)
    for number in NUMBERS:
        table.add_column(number.label, justify='right')
    for row in rows:
        table.add_row(*cells(row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for row in rows:
        for note in row['notes']:
            console.print(f'{row["arm"]}: {note}', soft_wrap=True, markup=False)
