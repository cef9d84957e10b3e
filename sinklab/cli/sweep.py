"""Train the rows of a table, each with each seed, and compare them with published numbers.

Each seed is used for the model and the data, so all rows of a seed see the same batches. If you run the same command
again, it skips runs that are done or have diverged, resumes those that were stopped, and retries those that crashed
or were refused. Differences are relative to the first row, the baseline. --config.PATH=VALUE sets a field of all
rows, such as --config.optimizer.steps=500.

example:
  sinklab sweep --config=configs/quickstart.py --seeds=3 --workdir=runs/sweep
  sinklab sweep --config=configs/quickstart.py --rows=softmax,sigmoid_minus_log_t --jobs=2 --workdir=runs/two --report
"""

import argparse
import json
import re
import shlex
import signal
from typing import Any

from sinklab.cli import config_flags, layout_flags, report, terminal
from sinklab.cli.flag_types import add_options, format_options, positive_int
from sinklab.cli.process_flags import format_command_line, get_program_argv
from sinklab.cli.progress import SweepDisplay
from sinklab.config.seed_list import SEEDS_HELP, parse_seeds
from sinklab.config.spec import Spec
from sinklab.errors import UserError, format_unknown_name, print_status
from sinklab.report import summary_table, sweep_table
from sinklab.report.runs import read_runs
from sinklab.run_dir import RunDir
from sinklab.storage.folder_lock import hold_folder
from sinklab.storage.paths import parse_path
from sinklab.sweep import plan, results
from sinklab.sweep.plan import SweepRun
from sinklab.sweep.run import run_sweep

LEFT_COLUMNS = 'row', 'end', 'claim', 'statement', 'source', 'verdict'
WRAP_COLUMNS = 'end', 'statement', 'source', 'verdict'  # columns that are wrapped on a narrow terminal
ROWS_OPTION = str, 'ROW,...', 'only these rows, such as softmax,sigmoid; the first is the baseline'
SEEDS_OPTION = str, 'N | SEED,...', f'{SEEDS_HELP} (default: %(default)s)'
JOBS_OPTION = positive_int, 'N', 'train N runs at once, each on its share of the cores, such as 2 (default: 1)'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config', required=True, metavar='FILE', help='config file with rows, such as configs/quickstart.py'
    )
    config_flags.add_size_argument(parser)
    parser.add_argument(
        '--workdir',
        required=True,
        metavar='DIR',
        help='folder for the run folders (ROW-SEED) and sweep.json, such as runs/sweep',
    )
    add_options(parser, {'rows': ROWS_OPTION})
    add_sweep_options(parser)
    parser.set_defaults(seeds='1')
    parser.add_argument('--report', action='store_true', help='also write DIR/report.html, a page with pictures')
    parser.add_argument('--json', action='store_true', help='print the table as JSON')
    parser.usage = '%(prog)s --config FILE [--rows ROW,...] --workdir DIR [--config.PATH=VALUE ...] [options]'


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that commands of many runs share."""
    add_options(parser, {'seeds': SEEDS_OPTION, 'jobs': JOBS_OPTION, 'compiled': layout_flags.CACHE_OPTION})
    layout_flags.add_arguments(parser)
    parser.set_defaults(jobs=1)


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    layout = layout_flags.parse_layout(args)
    module, rows = select_rows(args)
    seeds = parse_seeds(args.seeds)
    check_no_seed_overrides(extra_args)

    def load_row(row: str, seed: int) -> tuple[Spec, dict]:
        override_args = [*extra_args, *format_seed_flags(seed)]
        return config_flags.load_spec(f'{args.config}:{row}', override_args, args.size, module)

    def make_command(run: SweepRun) -> list[str]:
        return make_train_command(f'{args.config}:{run.row}', run, options)

    options = [*format_options(args, [*layout_flags.OPTIONS, 'size', 'compiled', 'metric']), *extra_args]
    with hold_folder(RunDir(args.workdir).path) as check_owner:
        runs = plan.plan_runs(rows, seeds, args.workdir, load_row, layout)
        write_table(args, extra_args, runs)  # so that other commands find the runs
        with SweepDisplay(runs) as display:
            stop_signal = run_sweep(runs, make_command, display, check_owner, args.jobs)
        check_owner()
        print_summary(args, write_table(args, extra_args, runs), stop_signal)
    return report_failures('sweep', runs, stop_signal)


def check_no_seed_overrides(extra_args: list[str]) -> None:
    for argument in extra_args:
        if argument.startswith(('--config.seed=', '--config.data.seed=')):
            raise UserError(f'{argument}: a sweep sets both seeds of a run; give --seeds')


def report_failures(command_name: str, runs: list[SweepRun], stop_signal: int | None) -> int:
    """Print the failures of runs, and a command to resume after a signal; return the exit code.

    Returns:
        130 after SIGINT, 143 after another signal, 1 if a run was refused or crashed, otherwise 0.
    """
    failures = [f'{run.row} {run.outcome}: {run.reason}' for run in runs if run.outcome in ('refused', 'crashed')]
    for message in dict.fromkeys(failures):
        print_status(f'sinklab {command_name}: {message}')
    if stop_signal:
        print_status(f'sinklab {command_name}: stopped; resume with: {format_command_line()}')
        return 128 + (signal.SIGINT if stop_signal == signal.SIGINT else signal.SIGTERM)
    return 1 if failures else 0


def select_rows(args: argparse.Namespace) -> tuple[Any, list[str]]:
    """Load the config file; return its module and the names of the selected rows, in the order of --rows."""
    file, row = config_flags.split_config_path(args.config)
    if row:
        suggestion = shlex.join([f'--config={file}', f'--rows={row}'])
        raise UserError(f'--config={args.config} names a row; give {suggestion}')
    module = config_flags.load_config_module(file)
    table = getattr(module, 'ROWS', {})
    if not table:
        raise UserError(f'--config={file} has no rows; sinklab rows lists the files that have rows')
    names = list(table) if args.rows is None else args.rows.split(',')
    for name in names:
        if names.count(name) > 1:
            raise UserError(f'--rows={args.rows} names {name!r} twice; name each row once')
        if name not in table:
            raise UserError(format_unknown_name(f'--rows={args.rows}: row {name!r}', name, table, f'rows of {file}'))
    return module, names


def format_seed_flags(seed: int) -> list[str]:
    return [f'--config.seed={seed}', f'--config.data.seed={seed}']


def make_train_command(config_path: str, run: SweepRun, options: list[str]) -> list[str]:
    flags = [f'--config={config_path}', f'--workdir={run.run_dir}', '--processes=1']
    return [*get_program_argv(), 'train', *flags, *options, *format_seed_flags(run.seed)]


def write_table(args: argparse.Namespace, extra_args: list[str], runs: list[SweepRun]) -> list[dict]:
    """Write sweep.json, and return its rows."""
    overrides = config_flags.parse_overrides(extra_args)
    row_results = []
    for name in dict.fromkeys(run.row for run in runs):
        row_runs = [run for run in runs if run.row == name]
        done_runs = [run for run in row_runs if run.outcome == 'done']
        row_results.append(
            sweep_table.RowResult(
                row_runs[0].row_info | dict(overrides=overrides, steps=row_runs[0].spec.optimizer.steps),
                outcomes={run.seed: run.outcome for run in row_runs},
                reasons={run.seed: run.reason for run in row_runs if run.reason},
                metrics_by_seed={run.seed: sweep_table.read_last_metrics(run.run_dir) for run in done_runs},
            )
        )
    rows = sweep_table.make_sweep_table(row_results)
    results.write_json(args.workdir, 'sweep.json', omit_spans(rows))
    return rows


def omit_spans(rows: list[dict]) -> list[dict]:
    """Return the rows as in sweep.json, without the spans, which are only printed."""
    return [{name: value for name, value in row.items() if name != 'span'} for row in rows]


def print_summary(args: argparse.Namespace, rows: list[dict], stop_signal: int | None) -> None:
    """Print the results of all runs, after writing report.html if it is requested."""
    paths = report.list_sweep_runs(parse_path(args.workdir)) if args.report and not stop_signal else []
    page_path = paths and report.write_report(parse_path(args.workdir), read_runs(list(map(str, paths))))
    if args.json:
        print(json.dumps(omit_spans(rows), indent=2, allow_nan=False))
    elif not stop_signal:
        headings, lines = build_summary_table(rows)
        print_table_with_note(headings, lines, format_legend(headings, rows))
        print(sweep_table.format_headline(rows))
        if page_path:
            print(f'page: {page_path}')
        else:
            command = ['sinklab', 'report', args.workdir, *config_flags.format_metric_option(args)]
            print_status(f'For a report with plots: {shlex.join(command)}')


def build_summary_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Build headings and cells of the summary table, with a column `runs` only if a row has several runs."""
    headings, lines = sweep_table.format_table_cells(rows)
    has_several_runs = any(len(row['seeds']) > 1 for row in rows)
    columns = [column for column in zip(headings, *lines, strict=True) if column[0] != 'runs' or has_several_runs]
    shown_headings, *shown_lines = map(list, zip(*columns, strict=True))
    return shown_headings, shown_lines


def format_legend(headings: list[str], rows: list[dict]) -> str:
    """Format the legend of the summary table: the meaning of its columns and cells."""
    parts = [summary_table.format_legend(headings)]
    if any(list(row['seeds'].values()).count('done') > 1 for row in rows):
        parts.append('±: standard deviation over runs')
    shown = {name for row in rows for name in row['ours']}
    if any(row['published'].get(name) is not None for row in rows for name in shown):
        parts.append('in parentheses: published value of another model')
    return f'{"; ".join(parts)}.'


def print_table_with_note(headings: list[str], rows: list[list[str]], note: str = '') -> None:
    """Print a table with units or the last words of its headings on a second line, and a note below the table."""
    headings = [re.sub(r' (?=- |\(|\S+$)', '\n', heading, count=1) for heading in headings]
    console = terminal.make_console(width=200)
    terminal.print_table(console, headings, rows, left_columns=LEFT_COLUMNS, wrap_columns=WRAP_COLUMNS)
    if note:
        terminal.print_wrapped(note)
