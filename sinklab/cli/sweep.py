"""Train the rows of a table, each with each seed, and compare them with published numbers.

A seed is that of the model and of the data, so all rows of a seed see the same batches. The same command, given
again, skips runs that are done or have diverged, goes on with those that were stopped, and retries those that failed.
Differences are from the first row, the baseline. --config.PATH=VALUE sets a field of all rows, such as
--config.optimizer.steps=500.

example:
  sinklab sweep --config=configs/quickstart.py --seeds=3 --workdir=runs/sweep --remat
  sinklab sweep --config=configs/quickstart.py --rows=softmax,sigmoid_apple --jobs=2 --workdir=runs/two --report
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sinklab.cli import config, hardware, programs, report
from sinklab.cli.command import again, program
from sinklab.cli.train import size_argument
from sinklab.escape import escape_control, join_shell
from sinklab.files.place import place
from sinklab.files.whole import whole, writable
from sinklab.folder import Folder
from sinklab.lease import Lease, lease
from sinklab.record import Refusal, unknown
from sinklab.seeds import SEEDS_HELP, list_seeds, parse_seeds
from sinklab.spec import Spec
from sinklab.sweep import plan
from sinklab.sweep.plan import Run
from sinklab.sweep.run import shares, train

if TYPE_CHECKING:
    from rich.text import Text

LEFT = 'row', 'end', 'claim', 'words', 'source', 'verdict'
WORDS = 'end', 'words', 'source', 'verdict'  # columns that are folded where a terminal is narrow


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        required=True,
        metavar='FILE',
        help='config file with rows, such as configs/quickstart.py; sinklab rows lists them',
    )
    verb.add_argument(
        '--rows',
        metavar='ROW,...',
        help='only these rows, in this order, such as softmax,sigmoid_apple; the first is the baseline',
    )
    size_argument(verb)
    seeds_argument(verb, 'seed 0 alone')
    verb.add_argument(
        '--workdir',
        required=True,
        metavar='DIR',
        help='folder for the run folders (ROW-SEED) and sweep.json, such as runs/sweep',
    )
    jobs_argument(verb)
    hardware.arguments(verb)
    programs.argument(verb)
    verb.add_argument('--report', action='store_true', help='also write DIR/report.html, a page with pictures')
    verb.add_argument('--json', action='store_true', help='print the table as JSON')
    verb.usage = '%(prog)s --config FILE [--rows ROW,...] --workdir DIR [--config.PATH=VALUE ...] [options]'


def seeds_argument(verb: argparse.ArgumentParser, otherwise: str) -> None:
    verb.add_argument('--seeds', metavar='N | SEED,...', help=f'{SEEDS_HELP} (default: {otherwise})')


def jobs_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--jobs',
        type=int,
        default=1,
        metavar='N',
        help='train N runs at once, each on its share of the cores, such as 2 (default: 1)',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    layout, (module, table) = hardware.hardware(given), rows(given)
    asked = [0] if given.seeds is None else parse_seeds(given.seeds)
    shares(given.jobs)
    refuse_seeds(rest)

    def load(row: str, seed: int) -> tuple[Spec, dict]:
        return config.load(f'{given.config}:{row}', [*rest, *seed_options(seed)], given.size, module)

    options = [f'--{name}={value}' for name in ('size', 'compiled') if (value := getattr(given, name))]
    options = [*hardware.options(layout), *options, *rest]
    with lease(Folder(given.workdir).path) as held:
        if given.seeds is not None:
            plan.refuse_older_reading(given.seeds, table, given.workdir)
        runs = plan.runs(table, asked, given.workdir, load, layout)
        if given.seeds is not None and ',' not in given.seeds:
            say(f'sinklab sweep: --seeds={given.seeds} is a count: seeds {list_seeds(asked)}')
        for names in plan.twins(runs):
            say(f'sinklab sweep: {" and ".join(names)} are the same run at size {runs[0].size}')
        for run in {run.row: run for run in runs}.values():
            if comes_to := config.describe_row(module, run.row, run.size, run.spec):
                say(f'sinklab sweep: {run.row} {comes_to}')
        expected = config.expected_of(module, runs[0].size, rest)
        stopped = trained(runs, lambda run: command(f'{given.config}:{run.row}', run, options), held, given.jobs)
        held.check()
        summary(given, rest, table, runs, stopped, expected)
    return ended('sweep', runs, stopped)


def trained(runs: list[Run], command: Callable[[Run], list[str]], held: Lease, jobs: int) -> int | None:
    """Train what is to do, shown in one display; return the signal that has ended it before its time."""
    from sinklab.cli.progress import Runs

    with Runs(runs, jobs) as display:
        return train(runs, command, display, held, jobs)


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


def rows(given: argparse.Namespace) -> tuple[Any, dict[str, dict]]:
    """The module of the config file, and the rows to run, in their order, with what each is about."""
    file, _, row = given.config.partition(':')
    if row:
        instead = join_shell([f'--config={file}', f'--rows={row}'])
        raise Refusal(f'--config={given.config} names a row; give {instead}')
    module = config.module_of(file)
    table = config.rows(file, given.size, module)
    if not table:
        raise Refusal(f'--config={file} has no rows; sinklab rows lists the files that have')
    names = given.rows.split(',') if given.rows is not None else list(table)
    if len(set(names)) < len(names):
        raise Refusal(f'--rows={given.rows} names a row twice; give each once')
    for name in names:
        if name not in table:
            raise Refusal(unknown(f'--rows={given.rows}: row {name!r}', name, table, f'rows of {file}'))
    return module, {name: table[name] for name in names}


def seed_options(seed: int) -> list[str]:
    return [f'--config.seed={seed}', f'--config.data.seed={seed}']


def command(config: str, run: Run, options: list[str]) -> list[str]:
    row = [f'--config={config}', f'--workdir={run.folder}', '--processes=1']
    return [*program(), 'train', *row, *options, *seed_options(run.seed)]


def summary(
    given: argparse.Namespace,
    rest: list[str],
    table: dict[str, dict],
    runs: list[Run],
    stopped: int | None,
    expected: config.Expected | None,
) -> None:
    """Write sweep.json, and a page if that is asked for, then print the results of all runs."""
    from sinklab.report import closing, sweep

    overrides = dict(map(config.override, rest))
    arms = [arm(dict(about, overrides=overrides), runs) for about in table.values()]
    rows, spans = sweep.table(arms), sweep.spans(arms)
    text = json.dumps(rows, indent=2, allow_nan=False)
    folder = place(given.workdir)
    with writable(folder), whole(folder / 'sweep.json') as unfinished:
        unfinished.write_text(text + '\n', encoding='utf-8')
    page = report.write_page(folder) if given.report and not stopped else None
    if given.json:
        print(text)
    elif not stopped:
        headings, lines = columns(rows, spans)
        show(headings, lines, note(headings, rows))
        seen = closing.seen_of_rows(rows, spans)
        print_words(closing.sentence(seen, *(expected or closing.published(table)), page))


def arm(about: dict, runs: list[Run]) -> Any:
    from sinklab.report.sweep import Arm, newest

    mine = [run for run in runs if run.row == about['row']]
    return Arm(
        dict(about, size=mine[0].size),
        outcomes={run.seed: run.outcome for run in mine},
        reasons={run.seed: run.reason for run in mine if run.reason},
        numbers={run.seed: newest(run.folder) for run in mine if run.outcome == 'done'},
    )


def columns(rows: list[dict], spans: dict) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the closing table; a count of runs only where a row has several."""
    from sinklab.report import sweep

    headings, lines = sweep.cells(rows, spans)
    kept = [at for at, one in enumerate(headings) if one != 'runs' or any(len(row['seeds']) > 1 for row in rows)]
    return [headings[at] for at in kept], [[line[at] for at in kept] for line in lines]


def note(headings: list[str], rows: list[dict]) -> str:
    """Say what the columns of a table of rows mean, and what stands in its cells."""
    from sinklab.report import closing, sweep

    several = any(list(row['seeds'].values()).count('done') > 1 for row in rows)
    said = [closing.legend(headings), *(['±: standard deviation over runs'] if several else [])]
    return (
        '; '.join(
            [*said, *(['in parentheses: as published, of another model'] if sweep.shows_published(rows) else [])]
        )
        + '.'
    )


def show(headings: list[str], rows: list[list[str]], note: str = '') -> None:
    """Print a table whose units stand in a line of their own below the headings, and a note."""
    from sinklab.cli import terminal

    terminal.print_table(terminal.console(width=200), list(map(two_lines, headings)), rows, left=LEFT, words=WORDS)
    if note:
        print_words(note)


def two_lines(heading: str) -> 'Text | str':
    """Divide 'Sink_1 - softmax (%)' after Sink_1, 'valid loss (nats)' before its unit, 'row mass' between words."""
    from sinklab.cli import terminal

    name, sign, rest = heading.partition(' - ')
    if not sign:
        name, sign, rest = heading.rpartition(' (' if ' (' in heading else ' ')
    return terminal.lines(name, f'{sign.strip()}{" " if sign == " - " else ""}{rest}') if name else heading


def print_words(text: str) -> None:
    """Print a text, wrapped between words where it goes to a terminal."""
    from sinklab.cli import terminal

    out = terminal.console()
    out.print(escape_control(text), soft_wrap=not out.is_terminal)


def say(text: str) -> None:
    sys.stderr.write(f'{escape_control(text)}\n')  # whole, beside what runs at once say
    sys.stderr.flush()
