"""the rows of a table trained one after another, and compared with what was published

Each row runs with each seed, of model and data alike, so that the arms of a seed see the same batches. Given once
more, the command passes over what is done or has diverged, goes on with the rest, and tries again what failed.

example:
  sinklab sweep --config=configs/quickstart.py --seeds=0,1,2 --workdir=runs/sweep --remat
  sinklab report runs/sweep/*/
"""

import argparse
import dataclasses
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinklab.cli import programs
from sinklab.cli.process import STOPPED, followed, signals
from sinklab.cli.train import again, hardware_arguments, layout, program, size_argument
from sinklab.folder import Folder, whole
from sinklab.record import Refusal, unknown
from sinklab.spec import Hardware, Spec


@dataclasses.dataclass
class Run:
    """One row with one seed, and what has become of it: to do, done, diverged, refused or crashed."""

    row: str
    seed: int
    folder: Folder
    size: str | None
    spec: Spec | None
    outcome: str = 'to do'
    reason: str = ''

    def __str__(self) -> str:
        return f'{self.row}, seed {self.seed}'

    def begun(self) -> bool:
        """Whether the folder holds this very run."""
        try:
            self.folder.check(self.spec)
        except ValueError:  # a Refusal, or a damaged file
            return False
        return (self.folder.path / 'config.json').exists()


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--config', required=True, metavar='FILE', help='a config file with rows; see sinklab rows')
    verb.add_argument('--rows', metavar='ROW,...', help='these alone, in this order; the first is the baseline')
    size_argument(verb)
    verb.add_argument('--seeds', default='0', metavar='N,...', help='such as 0,1,2; 0 where none is given')
    verb.add_argument('--workdir', required=True, metavar='DIR', help='of the run folders ROW-SEED, and sweep.json')
    hardware_arguments(verb)
    programs.argument(verb)
    verb.add_argument('--json', action='store_true', help='print the table as one JSON list')
    verb.usage = '%(prog)s --config FILE [--rows ROW,...] --workdir DIR [--config.PATH=VALUE ...] [options]'


def run(given: argparse.Namespace, rest: list[str]) -> int:
    hardware = layout(given)
    options = [*laid(hardware), *(f'--{name}={value}' for name, value in passed_on(given)), *rest]
    table = chosen(given)
    runs = planned(given, rest, table, hardware)
    stopped = train(runs, lambda run: command(given.config, run, options))
    summary(given, rest, table, runs)
    failed = [f'{run.row} {run.outcome}: {run.reason}' for run in runs if run.outcome in ('refused', 'crashed')]
    for words in dict.fromkeys(failed):
        say(f'sinklab sweep: {words}')
    if stopped:
        say(f'sinklab sweep: stopped; go on with: {again()}')
        return 42 if stopped == signal.SIGTERM else 130
    return 1 if failed else 0


def passed_on(given: argparse.Namespace) -> list[tuple[str, str]]:
    return [(name, value) for name in ('size', 'compiled') if (value := getattr(given, name))]


def chosen(given: argparse.Namespace) -> dict[str, dict]:
    """The rows to run, in their order, and what each is about."""
    from sinklab.cli.config import rows

    file, _, row = given.config.partition(':')
    if row:
        raise Refusal(f'--config={given.config} names a row; give --config={file} --rows={row}')
    table = rows(file)
    if not table:
        raise Refusal(f'--config={file} has no rows; sinklab rows lists the files that have')
    names = given.rows.split(',') if given.rows is not None else list(table)
    if len(set(names)) < len(names):
        raise Refusal(f'--rows={given.rows} names a row twice; give each once')
    for name in names:
        if name not in table:
            raise Refusal(unknown(f'--rows={given.rows}: row {name!r}', name, table, f'rows of {file}'))
    return {name: table[name] for name in names}


def planned(given: argparse.Namespace, rest: list[str], table: dict[str, dict], hardware: Hardware) -> list[Run]:
    """Every run, a whole table seed by seed; none of them where one is refused."""
    for argument in rest:
        if argument.startswith(('--config.seed=', '--config.data.seed=')):
            raise Refusal(f'{argument}: a sweep sets both seeds of a run; give --seeds')
    if (Path(given.workdir) / 'config.json').exists():
        raise Refusal(f'--workdir={given.workdir} holds a run; give a folder for the runs of a sweep')
    runs = [read(given, rest, row, seed) for seed in seeds(given.seeds) for row in table]
    together(runs)
    for run in runs:
        look(run, hardware)
    together(runs)
    tell_twins(runs)
    try:
        Path(given.workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f'--workdir={given.workdir} cannot be made ({error.strerror}); choose another') from error
    return runs


def together(runs: list[Run]) -> None:
    """Refuses all runs where one is refused, so that no typo is met after hours of training."""
    reasons = {run.row: run.reason for run in runs if run.outcome == 'refused'}
    if not reasons:
        return
    (row, reason), *others = reasons.items()
    if len(reasons) == len({run.row for run in runs}) and len(set(reasons.values())) == 1:
        raise Refusal(reason)
    too = f' (and so are {", ".join(other for other, _ in others)})' if others else ''
    raise Refusal(f'row {row} is refused{too}: {reason}; nothing was trained: mend that, or name other --rows')


def tell_twins(runs: list[Run]) -> None:
    """Rows that differ at the paper's size may not at a smaller one."""
    rows = {}
    for run in runs:
        rows.setdefault(run.spec, []).append(run.row)
    for same in dict.fromkeys(tuple(names) for names in rows.values() if len(names) > 1):
        say(f'sinklab sweep: {" and ".join(same)} are the same run at size {runs[0].size}')


def seeds(given: str) -> list[int]:
    found = [int(seed) if seed.isdecimal() else -1 for seed in given.split(',')]
    if not all(0 <= seed < 2**32 for seed in found) or len(set(found)) < len(found):
        raise Refusal(f'--seeds={given}: give whole numbers from 0 to 2^32 - 1, each once, such as --seeds=0,1,2')
    return found


def seeded(seed: int) -> list[str]:
    return [f'--config.seed={seed}', f'--config.data.seed={seed}']


def read(given: argparse.Namespace, rest: list[str], row: str, seed: int) -> Run:
    """A run as it is asked for, refused where that cannot be."""
    from sinklab.cli.config import load

    folder = Folder(f'{given.workdir}/{row}-{seed}')
    try:
        spec, about = load(f'{given.config}:{row}', [*rest, *seeded(seed)], given.size)
    except Refusal as refusal:
        return Run(row, seed, folder, given.size, None, 'refused', str(refusal))
    return Run(row, seed, folder, about['size'], spec)


def look(run: Run, hardware: Hardware) -> None:
    """What its folder knows of a run; if that is not its end, what `train` refuses of its folder and its layout."""
    from sinklab.train import step

    if run.begun():
        if run.folder.saved()[-1:] == [run.spec.optimizer.steps]:
            run.outcome, run.reason = ended(run)
            return
        path = run.folder.path / 'outcome.json'
        if path.exists() and (before := run.folder.read('outcome'))['outcome'] == 'diverged':
            run.outcome, run.reason = 'diverged', before['reason']
            return
    try:
        run.folder.check(run.spec)
        step.check(run.spec, hardware)
    except Refusal as refusal:
        run.outcome, run.reason = 'refused', str(refusal)


def ended(run: Run) -> tuple[str, str]:
    """(outcome, reason) of a run whose last step is saved."""
    try:
        run.folder.check_end(run.spec.optimizer.steps)
    except Refusal as refusal:
        return 'refused', str(refusal)
    return 'done', ''


def laid(hardware: Hardware) -> list[str]:
    """The hardware as options of train."""
    given = {name: value for name, value in dataclasses.asdict(hardware).items() if value is not None}
    remat = given.pop('remat')
    return [*(f'--{name}={value}' for name, value in given.items()), *(['--remat'] if remat else [])]


def command(config: str, run: Run, options: list[str]) -> list[str]:
    row = [f'--config={config}:{run.row}', f'--workdir={run.folder}']
    return [*program(), 'train', *row, *options, *seeded(run.seed)]


def train(runs: list[Run], command: Callable[[Run], list[str]]) -> int | None:
    """Runs what is to do, each in its own process; returns the signal that has ended it before its time."""
    with signals() as received:
        for number, run in enumerate(runs, 1):
            at = f'[{number}/{len(runs)}] {run}'
            if run.outcome != 'to do':
                say(f'{at}: {run.outcome} before; to run it again, delete {run.folder}')
                continue
            if received:
                break
            say(at)
            code, said = followed(command(run), received)
            if code in STOPPED:
                received.append(STOPPED[code])
            if code in (0, 3) or not received:
                settle(run, code, said)
    return received[0] if received and any(run.outcome == 'to do' for run in runs) else None


def settle(run: Run, code: int, said: str) -> None:
    """Notes how a run has ended, in its folder too if it has one."""
    run.outcome, run.reason = ending(code, said)
    if run.begun():
        run.folder.write('outcome', dict(outcome=run.outcome, reason=run.reason))


def ending(code: int, said: str) -> tuple[str, str]:
    """(outcome, reason) of a run that ended with this code and these words."""
    words = re.findall('sinklab train: (.+)', said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code == 0:
        return 'done', ''
    if code == 3 or (code == 1 and words):
        return 'refused' if code == 1 else 'diverged', words[-1].strip() if words else ''
    if code < 0:
        return 'crashed', f'killed by {signal.Signals(-code).name}'
    return 'crashed', f'exit code {code}: {lines[-1] if lines else "without a word"}'


def summary(given: argparse.Namespace, rest: list[str], table: dict[str, dict], runs: list[Run]) -> None:
    """Prints the table, and writes sweep.json."""
    from sinklab.cli.config import override
    from sinklab.report import sweep

    overrides = dict(map(override, rest))
    rows = sweep.table([arm(dict(about, overrides=overrides), runs) for about in table.values()])
    text = json.dumps(rows, indent=2, allow_nan=False)
    if given.json:
        print(text)
    else:
        show(*sweep.cells(rows))
    try:
        with whole(Path(given.workdir) / 'sweep.json') as unfinished:
            unfinished.write_text(text + '\n', encoding='utf-8')
    except OSError as error:
        raise Refusal(f'{given.workdir}/sweep.json cannot be written ({error.strerror}); make room for it') from error


def arm(about: dict, runs: list[Run]) -> Any:
    from sinklab.report.sweep import Arm, newest

    mine = [run for run in runs if run.row == about['row']]
    return Arm(
        dict(about, size=mine[0].size),
        outcomes={run.seed: run.outcome for run in mine},
        reasons={run.seed: run.reason for run in mine if run.reason},
        numbers={run.seed: newest(run.folder) for run in mine if run.outcome == 'done'},
    )


def show(headings: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    for heading in headings:
        table.add_column(escape(heading), justify='left' if heading in ('row', 'outcome') else 'right')
    for cells in rows:
        table.add_row(*map(escape, cells))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table, 'mean ± standard deviation over n seeds (published, at the size of the source)', sep='\n')


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
