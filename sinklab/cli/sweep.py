"""the rows of a table trained one after another, and compared with what was published

Each row runs with each seed, of model and data alike, so that the arms of a seed see the same batches. Given once
more, the command passes over what is done or has diverged, goes on with the rest, and tries again what failed.

example:
  sinklab sweep --config=configs/quickstart.py --seeds=3 --workdir=runs/sweep --remat
  sinklab report runs/sweep/*/
"""

import argparse
import json
import signal
import sys
from typing import Any

from sinklab.cli import config, hardware, programs
from sinklab.cli.command import again, program
from sinklab.cli.train import size_argument
from sinklab.escape import escape_control, join_shell
from sinklab.files.place import place
from sinklab.files.whole import whole, writable
from sinklab.folder import Folder
from sinklab.lease import lease
from sinklab.record import Refusal, unknown
from sinklab.spec import Spec
from sinklab.sweep import plan
from sinklab.sweep.plan import Run
from sinklab.sweep.run import shares, train

LEFT = 'row', 'outcome', 'claim', 'words', 'source', 'verdict'
WORDS = 'outcome', 'words', 'source', 'verdict'  # columns that are folded where a terminal is narrow


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--config', required=True, metavar='FILE', help='a config file with rows; see sinklab rows')
    verb.add_argument('--rows', metavar='ROW,...', help='these alone, in this order; the first is the baseline')
    size_argument(verb)
    seeds_argument(verb, 'seed 0 where none is given')
    verb.add_argument('--workdir', required=True, metavar='DIR', help='of the run folders ROW-SEED, and sweep.json')
    jobs_argument(verb)
    hardware.arguments(verb)
    programs.argument(verb)
    verb.add_argument('--json', action='store_true', help='print the table as one JSON list')
    verb.usage = '%(prog)s --config FILE [--rows ROW,...] --workdir DIR [--config.PATH=VALUE ...] [options]'


def seeds_argument(verb: argparse.ArgumentParser, otherwise: str) -> None:
    verb.add_argument('--seeds', metavar='N | SEED,...', help=f'{plan.SEEDS_HELP}; {otherwise}')


def jobs_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--jobs', type=int, default=1, metavar='N', help='runs at once, each on its share of cores')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    layout, table = hardware.hardware(given), rows(given)
    asked = [0] if given.seeds is None else plan.parse_seeds(given.seeds)
    shares(given.jobs)
    refuse_seeds(rest)

    def load(row: str, seed: int) -> tuple[Spec, dict]:
        return config.load(f'{given.config}:{row}', [*rest, *seed_options(seed)], given.size)

    options = [f'--{name}={value}' for name in ('size', 'compiled') if (value := getattr(given, name))]
    options = [*hardware.options(layout), *options, *rest]
    with lease(Folder(given.workdir).path) as held:
        if given.seeds is not None:
            plan.refuse_older_reading(given.seeds, table, given.workdir)
        runs = plan.runs(table, asked, given.workdir, load, layout)
        if given.seeds is not None and ',' not in given.seeds:
            say(f'sinklab sweep: --seeds={given.seeds} is a count: seeds {plan.list_seeds(asked)}')
        for names in plan.twins(runs):
            say(f'sinklab sweep: {" and ".join(names)} are the same run at size {runs[0].size}')
        for run in {run.row: run for run in runs}.values():
            if comes_to := config.describe_row(f'{given.config}:{run.row}', run.size, run.spec):
                say(f'sinklab sweep: {run.row} {comes_to}')
        stopped = train(runs, lambda run: command(f'{given.config}:{run.row}', run, options), say, held, given.jobs)
        held.check()
        summary(given, rest, table, runs)
    return ended('sweep', runs, stopped)


def refuse_seeds(rest: list[str]) -> None:
    for argument in rest:
        if argument.startswith(('--config.seed=', '--config.data.seed=')):
            raise Refusal(f'{argument}: a sweep sets both seeds of a run; give --seeds')


def ended(verb: str, runs: list[Run], stopped: int | None) -> int:
    """Says what has failed and what has stopped the rest, and returns the exit code."""
    failed = [f'{run.row} {run.outcome}: {run.reason}' for run in runs if run.outcome in ('refused', 'crashed')]
    for words in dict.fromkeys(failed):
        say(f'sinklab {verb}: {words}')
    if stopped:
        say(f'sinklab {verb}: stopped; go on with: {again()}')
        return 130 if stopped == signal.SIGINT else 42
    return 1 if failed else 0


def rows(given: argparse.Namespace) -> dict[str, dict]:
    """The rows to run, in their order, and what each is about."""
    file, _, row = given.config.partition(':')
    if row:
        instead = join_shell([f'--config={file}', f'--rows={row}'])
        raise Refusal(f'--config={given.config} names a row; give {instead}')
    table = config.rows(file, given.size)
    if not table:
        raise Refusal(f'--config={file} has no rows; sinklab rows lists the files that have')
    names = given.rows.split(',') if given.rows is not None else list(table)
    if len(set(names)) < len(names):
        raise Refusal(f'--rows={given.rows} names a row twice; give each once')
    for name in names:
        if name not in table:
            raise Refusal(unknown(f'--rows={given.rows}: row {name!r}', name, table, f'rows of {file}'))
    return {name: table[name] for name in names}


def seed_options(seed: int) -> list[str]:
    return [f'--config.seed={seed}', f'--config.data.seed={seed}']


def command(config: str, run: Run, options: list[str]) -> list[str]:
    row = [f'--config={config}', f'--workdir={run.folder}', '--processes=1']
    return [*program(), 'train', *row, *options, *seed_options(run.seed)]


def summary(given: argparse.Namespace, rest: list[str], table: dict[str, dict], runs: list[Run]) -> None:
    """Write sweep.json, then print the table."""
    from sinklab.report import sweep

    overrides = dict(map(config.override, rest))
    rows = sweep.table([arm(dict(about, overrides=overrides), runs) for about in table.values()])
    text = json.dumps(rows, indent=2, allow_nan=False)
    folder = place(given.workdir)
    with writable(folder), whole(folder / 'sweep.json') as unfinished:
        unfinished.write_text(text + '\n', encoding='utf-8')
    if given.json:
        print(text)
    else:
        show(*sweep.cells(rows))


def arm(about: dict, runs: list[Run]) -> Any:
    from sinklab.report.sweep import Arm, newest

    mine = [run for run in runs if run.row == about['row']]
    return Arm(
        dict(about, size=mine[0].size),
        outcomes={run.seed: run.outcome for run in mine},
        reasons={run.seed: run.reason for run in mine if run.reason},
        numbers={run.seed: newest(run.folder) for run in mine if run.outcome == 'done'},
    )


NOTE = 'mean ± standard deviation over n seeds (published, at the size of the source)'


def show(headings: list[str], rows: list[list[str]], note: str = NOTE) -> None:
    from sinklab.cli import terminal

    out = terminal.console(width=200)
    terminal.print_table(out, headings, rows, left=LEFT, words=WORDS)
    out.print(note)


def say(text: str) -> None:
    sys.stderr.write(f'{escape_control(text)}\n')  # whole, beside what runs at once say
    sys.stderr.flush()
