"""Show runs as a table, and write a page (report.html) that needs no network.

The runs may be one, a sweep or hundreds, done or under way. Runs that differ in their seeds alone are shown as mean
and spread.

example:
  sinklab report runs/quickstart/* --png
  sinklab report runs/sweep --paper --pdf --latex
"""

import argparse
import glob
import json
import sys
from pathlib import Path
from types import ModuleType

from sinklab.escape import escape_control
from sinklab.files.place import absolute, common, is_remote, place
from sinklab.folder import Folder
from sinklab.install import format_extra_command
from sinklab.record import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        'runs',
        nargs='+',
        metavar='DIR',
        help='run folders, or the folder of a sweep or of claims, such as runs/sweep',
    )
    verb.add_argument(
        '--out', metavar='DIR', help='folder for report.html (default: the folder that all runs lie in)'
    )
    verb.add_argument('--paper', action='store_true', help='order and number the figures as the paper does')
    for kind in ('png', 'svg', 'pdf'):
        verb.add_argument(f'--{kind}', action='store_true', help=f'also write the pictures as {kind.upper()} files')
    verb.add_argument(
        '--latex', action='store_true', help='also write the table by row as LaTeX (table.tex, with booktabs)'
    )
    verb.add_argument('--json', action='store_true', help='print the table as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab report --help')
    from sinklab.report import closing, runs
    from sinklab.sweep import results

    paths = [str(path) for one in given.runs for path in matching(one)]
    found = runs.read(paths)
    claimed = results.verdicts(beside(paths))
    page = write(place(given.out) if given.out else beside(paths), found, given, claimed)
    table = closing.table(found)
    if given.json:
        print(json.dumps(table, indent=2, allow_nan=False))
    else:
        show(table)
    print(f'report: {escape_control(page)}', file=sys.stderr if given.json else sys.stdout)
    return 0


def matching(given: str) -> list[Path]:
    """The runs of a sweep; in a bucket those of a pattern, which no shell has looked for; else, as given."""
    if not (is_remote(given) and glob.has_magic(given)):
        return of_sweep(place(given)) or of_claims(place(given)) or [place(given)]
    start = given[: min(given.index(sign) for sign in '*?[' if sign in given)].rpartition('/')[0]
    found = [path.parent for path in place(start).glob(f'{given[len(start) + 1 :].rstrip("/")}/config.json')]
    if not found:
        raise Refusal(f'{given} matches no run; give run folders')
    return sorted(found)


def of_sweep(folder: Path) -> list[Path]:
    """Of the folder of a sweep that has ended: its runs, the rows in their order."""
    if not (folder / 'sweep.json').exists():
        return []
    from sinklab.sweep import plan

    found = [folder / plan.name(row['row'], seed) for row in Folder(folder).read('sweep') for seed in row['seeds']]
    return [run for run in found if (run / 'row.json').exists()]


def of_claims(folder: Path) -> list[Path]:
    from sinklab.sweep import results

    return results.folders(folder)


def beside(runs: list[str]) -> Path:
    """A single run's own folder, or the innermost one that all of several lie in."""
    paths = [absolute(place(path)) for path in runs]
    return paths[0] if len(paths) == 1 else common([path.parent for path in paths])


def write(folder: Path, found: list, given: argparse.Namespace, claimed: list[dict]) -> Path:
    """The page, and what else is asked for."""
    from sinklab.report import latex, page

    kinds = [kind for kind in ('png', 'svg', 'pdf') if getattr(given, kind)]
    try:
        if not is_remote(folder):
            folder.mkdir(parents=True, exist_ok=True)
        page.write(folder / 'report.html', found, given.paper, claimed)
        if kinds:
            pictures().write(folder, found, kinds)
        if given.latex:
            latex.write(folder / 'table.tex', found)
    except OSError as error:
        raise Refusal(f'{folder} cannot be written ({error.strerror}); choose another --out') from error
    return folder / 'report.html'


def write_page(folder: Path) -> Path | None:
    """Write the page of a sweep; return its file, or None where no run has begun."""
    from sinklab.report import page, runs

    file, paths = folder / 'report.html', [str(path) for path in of_sweep(folder)]
    if not paths:
        return None
    page.write(file, runs.read(paths))
    return file


def pictures() -> ModuleType:
    try:
        from sinklab.report import pictures
    except ImportError as error:
        raise Refusal(f'pictures need {error.name}; install it: {format_extra_command("report")}') from error
    return pictures


def show(rows: list[dict]) -> None:
    from sinklab.cli import terminal
    from sinklab.report.closing import HEADINGS, cells, legend

    out = terminal.console(width=200)
    columns = list(zip(HEADINGS, *map(cells, rows), strict=True))
    shown = [column for column in columns if not {'-'}.issuperset(column[1:])]  # none of which no run has a value
    headings, *lines = zip(*shown, strict=True)
    terminal.print_table(out, headings, lines)
    out.print(f'{legend(headings)}.', soft_wrap=not out.is_terminal)
    for row in rows:
        for note in row['notes']:
            print(f'{escape_control(row["arm"])}: {escape_control(note)}')
