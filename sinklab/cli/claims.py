"""Test claims of the paper by training runs, and give a verdict on each.

A claim compares two numbers of two rows. All claims share their runs, and each run is trained once. Run the same
command again to train the runs that are missing. A run whose numbers are in the claims.json of the folder is not
missing, even if its own folder is. Verdicts are computed from the differences between runs of the same
seed, see docs/guides/sweeps_and_claims.md. --config.PATH=VALUE sets a field of all runs.

example:
  sinklab claims --seeds=8 --jobs=2 --workdir=runs/claims
  sinklab claims sigmoid decay_more --workdir=runs/claims
  sinklab claims --results=docs/results/claims.json
  sinklab claims --list
"""

import argparse
import contextlib
import json
from collections.abc import Iterable

from sinklab.cli import config_flags, layout_flags, sweep, terminal
from sinklab.cli.flag_types import add_options, format_options
from sinklab.cli.progress import SweepDisplay
from sinklab.config.seed_list import parse_seeds
from sinklab.config.spec import Spec
from sinklab.configs.sizes import SIZES
from sinklab.errors import UserError, format_names, format_unknown_name
from sinklab.report.claims import (
    CLAIM_HEADINGS,
    LEGEND,
    format_claim_cells,
    format_counts,
    format_notes,
    format_sign_test,
    make_claims_table,
    parse_claims,
)
from sinklab.run_dir import RunDir
from sinklab.storage.folder_lock import hold_folder
from sinklab.storage.paths import parse_path
from sinklab.sweep import plan, results
from sinklab.sweep.run import run_sweep

DEFAULT_SIZE = 'quickstart'
OPTIONS = {
    'config': (str, 'FILE', 'file with CLAIMS (default: %(default)s)'),
    'workdir': (str, 'DIR', 'folder for the run folders (TABLE.ROW-SEED) and claims.json, such as runs/claims'),
    'results': (str, 'FILE', 'judge the measurements of an earlier claims.json, and train nothing'),
}
TEST_HINT = 'To test one of them: sinklab claims NAME --workdir=DIR'
# Patterns of metrics that are saved besides those of claims.
EXTRA_METRICS = {'valid/loss', 'fails', 'mass/row', 'entropy/row', 'emergence/step', 'norm/ratio/*', 'seconds'}
EXTRA_METRICS |= {'alpha/1', 'qk/cos/difference', 'norm/value/ratio'}  # of docs/results/emergence.md


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('names', nargs='*', metavar='NAME', help='claims to test, such as sigmoid (default: all)')
    parser.add_argument('--list', action='store_true', help='list all claims, and train nothing')
    add_options(parser, OPTIONS)
    config_flags.add_size_argument(parser, DEFAULT_SIZE)
    sweep.add_sweep_options(parser)
    parser.set_defaults(config='configs/claims.py', seeds='5')
    parser.add_argument('--json', action='store_true', help='print the verdicts as JSON')
    parser.usage = '%(prog)s [NAME ...] (--workdir DIR | --results FILE | --list) [--config.PATH=VALUE ...] [options]'


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    claim_table = config_flags.load_config_module(args.config, 'CLAIMS').CLAIMS
    for name in args.names:
        if name not in claim_table:
            raise UserError(format_unknown_name(f'claim {name!r}', name, claim_table, 'claims'))
    if sum(value is not None for value in (args.workdir, args.results, args.list or None)) != 1:
        raise UserError(
            'give one of --workdir=DIR to train the runs, --results=FILE to judge earlier measurements, or --list'
        )
    if args.list:
        claims = parse_claims(claim_table)
        claim_rows = [[name, claims[name].statement, claims[name].source] for name in args.names or claims]
        sweep.print_table_with_note(['claim', 'statement', 'source'], claim_rows, TEST_HINT)
        return 0
    if args.results is None:
        return train_claim_runs(args, extra_args, parse_claims(claim_table, args.size or DEFAULT_SIZE))
    if unused := [*format_options(args, ['seeds', 'size', 'compiled']), *extra_args]:
        raise UserError(f'--results={args.results} trains nothing; remove {" ".join(unused)}')
    claims_data = load_results(args.results)
    claims = parse_claims(claim_table, claims_data['size'])
    print_verdicts(args, compute_verdicts(claims, claims_data), claims_data['size'])
    return 0


def load_results(path: str) -> dict:
    """Read a claims.json, whose size must be one of SIZES."""
    if not parse_path(path).is_file():
        raise UserError(f'--results={path} is no file; give a {results.CLAIMS_FILE} that sinklab claims has written')
    claims_data = results.read_results(parse_path(path))
    size = claims_data['size']
    if size not in SIZES:
        raise UserError(format_unknown_name(f'{path}: size {size!r}', size, SIZES, 'sizes'))
    return claims_data


def load_row(row: str, seed: int, options: list[str], size: str) -> tuple[Spec, dict]:
    return config_flags.load_spec(get_config_path(row), [*options, *sweep.format_seed_flags(seed)], size)


def get_config_path(row: str) -> str:
    """Return TABLE:ROW as a value of --config; TABLE is the stem of a file in configs/, or a path."""
    table, _, name = row.partition(':')
    return row if table.endswith('.py') else f'configs/{table}.py:{name}'


def train_claim_runs(args: argparse.Namespace, extra_args: list[str], claims: dict) -> int:
    """Train the missing runs of the named claims, write claims.json and verdicts.json, and print the verdicts.

    Args:
        args: The parsed arguments.
        extra_args: Overrides --config.PATH=VALUE of all runs.
        claims: {name: `Claim`}, all claims of the config file.

    Returns:
        The exit code.

    Raises:
        UserError: An argument is invalid, or the folder has runs of rows that have changed.
    """
    layout = layout_flags.parse_layout(args)
    size = args.size or DEFAULT_SIZE
    seeds = parse_seeds(args.seeds)
    sweep.check_no_seed_overrides(extra_args)
    readings = [reading for name in args.names or claims for reading in claims[name].readings]
    layout_options = format_options(args, [*layout_flags.OPTIONS, 'compiled', 'metric'])
    options = [*layout_options, f'--size={size}', *extra_args]

    def make_command(run: plan.SweepRun) -> list[str]:
        return sweep.make_train_command(get_config_path(run.row), run, options)

    with hold_folder(RunDir(args.workdir).path) as check_owner:
        overrides = config_flags.parse_overrides(extra_args)
        old_data = results.read_or_create(args.workdir, dict(size=size, overrides=overrides))
        specs = {reading.row: load_row(reading.row, 0, extra_args, size)[0] for reading in readings}
        measured_rows = results.find_measured_rows(old_data, specs)
        if changed_rows := [row for row in specs if row in old_data['runs'] and row not in measured_rows]:
            raise UserError(
                f'{args.workdir} contains runs of {format_names(changed_rows)} with another config; give another '
                '--workdir'
            )
        first_rows: dict[Spec, str] = {}  # rows with equal specs are trained once
        rows = [measured_rows.get(row) or first_rows.setdefault(spec, row) for row, spec in specs.items()]
        all_runs = plan.plan_runs(
            dict.fromkeys(rows), seeds, args.workdir, lambda row, seed: load_row(row, seed, extra_args, size), layout
        )
        runs = [
            run for run in all_runs if run.run_dir.has_run() or str(run.seed) not in old_data['runs'].get(run.row, {})
        ]
        with SweepDisplay(runs) as display:
            stop_signal = run_sweep(runs, make_command, display, check_owner, args.jobs)
        check_owner()
        metric_patterns = {reading.metric for claim in claims.values() for reading in claim.readings}
        claims_data = results.add_runs(old_data, specs, runs, EXTRA_METRICS | metric_patterns)
        verdicts = compute_verdicts(claims, claims_data)
        results.write_json(args.workdir, results.CLAIMS_FILE, claims_data)
        results.write_json(args.workdir, results.VERDICTS_FILE, verdicts)
    print_verdicts(args, verdicts, claims_data['size'])
    return sweep.report_failures('claims', runs, stop_signal)


def collect_published_numbers(claims: dict) -> dict[str, dict]:
    """Return {row: its published numbers} for all rows that the claims read."""
    published = {}
    for row in {reading.row for claim in claims.values() for reading in claim.readings}:
        file, name = config_flags.split_config_path(get_config_path(row))
        module = config_flags.load_config_module(file)
        published[row] = config_flags.get_row_info(module, file, name, {})['published']
    return published


def find_runs(rows: Iterable[str], claims_data: dict) -> dict[str, dict]:
    """Return {row: {seed: measured}}, the runs of a measured row with the same config, for rows that have some."""
    options = [f'--config.{path}={value}' for path, value in claims_data['overrides'].items()]
    specs = {}
    for row in rows:
        with contextlib.suppress(UserError):  # a row that is invalid at this size has no runs
            specs[row], _ = load_row(row, 0, options, claims_data['size'])
    measured_rows = results.find_measured_rows(claims_data, specs)
    return {row: claims_data['runs'][measured_row] for row, measured_row in measured_rows.items()}


def compute_verdicts(claims: dict, claims_data: dict) -> list[dict]:
    """Compute the verdict on each claim."""
    rows = {reading.row for claim in claims.values() for reading in claim.readings}
    return make_claims_table(claims, find_runs(rows, claims_data), collect_published_numbers(claims))


def print_verdicts(args: argparse.Namespace, verdicts: list[dict], size: str) -> None:
    """Print the verdicts on the named claims, measured at a size."""
    entries = [entry for entry in verdicts if not args.names or entry['claim'] in args.names]
    if args.json:
        print(json.dumps(entries, indent=2, allow_nan=False))
        return
    for entry in entries if args.names else ():
        comparison = f'{entry["comparison"]}; ' if entry['comparison'] else ''
        terminal.print_wrapped(f'{entry["claim"]}: {entry["statement"]} ({comparison}{entry["source"]})')
    tested = [entry for entry in entries if entry['verdict'] not in ('not run', 'not testable here')]
    if tested:
        cells = list(map(format_claim_cells, tested))
        sweep.print_table_with_note(list(CLAIM_HEADINGS), cells, f'{LEGEND}; all at size {size}.')
    for note in format_notes(entries) if size != 'smoke' else []:
        terminal.print_wrapped(note)
    terminal.print_wrapped(f'{format_counts(entries)} {format_sign_test(entries)}'.rstrip())
    if size == 'smoke':
        terminal.print_wrapped('At size smoke nothing is learned, so these verdicts say nothing about the claims.')
