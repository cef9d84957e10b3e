"""Show runs as a table, and write a page (report.html) that needs no network.

Give one run, a sweep or hundreds of runs, finished or in progress. Runs that differ only in their seeds are shown as
mean and spread.

example:
  sinklab report runs/quickstart/* --png
  sinklab report runs/sweep --pdf
"""

import argparse
import glob
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sinklab.cli import terminal
from sinklab.errors import UserError, format_extra_command
from sinklab.report import summary_table
from sinklab.run_dir import RunDir, list_contained_runs
from sinklab.storage.files import open_writable_folder
from sinklab.storage.paths import find_common_folder, is_remote, make_absolute, parse_path
from sinklab.sweep import plan, results

PICTURE_KINDS = 'png', 'svg', 'pdf'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='DIR',
        help='folders of runs, sweeps or claims, such as runs/sweep, or one that contains them',
    )
    parser.add_argument(
        '--out', metavar='DIR', help='folder for report.html (default: the one that contains all runs)'
    )
    for kind in PICTURE_KINDS:
        parser.add_argument(f'--{kind}', action='store_true', help=f'also write the pictures as {kind.upper()} files')
    parser.add_argument('--json', action='store_true', help='print the table as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.report import runs

    patterns = [
        pattern for pattern in args.runs if is_remote(pattern) or not parse_path(pattern).is_file()
    ]  # as in runs/sweep/*
    paths = [path for pattern in patterns or args.runs for path in find_runs(pattern)]
    loaded_runs = runs.read_runs(list(map(str, paths)))
    out_dir = parse_path(args.out) if args.out else choose_report_dir(paths)
    report_path = write_report(out_dir, loaded_runs, [kind for kind in PICTURE_KINDS if getattr(args, kind)])
    table = list(map(summary_table.make_run_row, loaded_runs))
    if args.json:
        print(json.dumps(table, indent=2, allow_nan=False))
    else:
        print_runs(table)
    print(f'report: {report_path}', file=sys.stderr if args.json else sys.stdout)
    return 0


def find_runs(pattern: str) -> list[Path]:
    """Find the run folders that an argument stands for.

    Args:
        pattern: A run folder, the folder of a sweep or of claims, a folder that contains some of these, or a glob
            pattern of run folders in a bucket, which the shell has not expanded.

    Raises:
        UserError: A pattern matches no run.
    """
    if not (is_remote(pattern) and glob.has_magic(pattern)):
        path = parse_path(pattern)
        listed_paths = list_sweep_runs(path) or results.list_run_dirs(path)
        contained_paths = [] if RunDir(path).has_run() else list_contained_runs(path)
        return listed_paths or contained_paths or [path]
    parent = re.findall(r'[^*?[]*/', pattern)[0]
    configs = parse_path(parent).glob(f'{pattern[len(parent) :].rstrip("/")}/config.json')
    if not (run_paths := sorted(path.parent for path in configs)):
        raise UserError(f'{pattern} matches no run; give run folders')
    return run_paths


def list_sweep_runs(sweep_dir: Path) -> list[Path]:
    """List the run folders of a sweep, finished or stopped, in the order of its rows; [] for any other folder."""
    if not (sweep_dir / 'sweep.json').exists():
        return []
    rows = RunDir(sweep_dir).read_json('sweep')
    run_paths = [sweep_dir / plan.get_run_dir_name(row['row'], seed) for row in rows for seed in row['seeds']]
    return [path for path in run_paths if (path / 'row.json').exists()]


def choose_report_dir(run_paths: list[Path]) -> Path:
    """Return the folder of a single run, or the innermost folder that contains all of several runs."""
    paths = list(map(make_absolute, run_paths))
    return paths[0] if len(paths) == 1 else find_common_folder([path.parent for path in paths])


def write_report(out_dir: Path, runs: list, kinds: Sequence[str] = ()) -> Path:
    """Write report.html, and pictures of the given kinds; return the path of the page."""
    from sinklab.report import page

    path = out_dir / 'report.html'
    if out_dir.is_file():
        raise UserError(f'{out_dir} is a file; choose another --out')
    with open_writable_folder(out_dir):
        page.write_report_page(path, runs)
        if kinds:
            try:
                from sinklab.report import pictures
            except ImportError as error:
                raise UserError(
                    f'pictures need {error.name}; install it: {format_extra_command("report")}'
                ) from error
            pictures.write_pictures(out_dir, runs, kinds)
    return path


def print_runs(rows: list[dict]) -> None:
    """Print the table of runs, without the columns that are empty for all of them."""
    columns = zip(summary_table.list_run_headings(), *map(summary_table.format_run_cells, rows), strict=True)
    headings, *lines = zip(*(column for column in columns if {*column[1:]} != {'-'}), strict=True)
    console = terminal.make_console(width=200)
    terminal.print_table(console, headings, lines)
    if legend := summary_table.format_legend(headings):
        terminal.print_wrapped(f'{legend}.')
    for row in rows:
        for note in row['notes']:
            print(f'{row["run"]}: {note}')
