"""The runs of a sweep before it begins: every row with every seed, and what their folders know of them."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import PurePath

from sinklab.checkpoint import digests
from sinklab.escape import quote_file_name
from sinklab.files import run_files
from sinklab.files.regular import Damaged
from sinklab.files.whole import writable
from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.seeds import list_seeds, parse_seeds
from sinklab.spec import Hardware, Spec


def refuse_older_reading(given: str, rows: Iterable[str], workdir: str) -> None:
    """Refuse a count N where a row has a run of seed N and none of seeds before: N alone once meant that seed."""
    if ',' in given:
        return
    seeds = parse_seeds(given)

    def has_begun(row: str, seed: int) -> bool:
        return Folder(f'{workdir}/{name(row, seed)}').is_claimed()

    for row in rows:
        if has_begun(row, len(seeds)) and not any(has_begun(row, seed) for seed in seeds):
            raise Refusal(
                f'--seeds={given} is a count (seeds {list_seeds(seeds)}), and {workdir} has row {row} with seed '
                f'{given} alone; go on with that by --seeds={given},'
            )


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

    def last_outcome(self) -> dict:
        """Its outcome.json; nothing where the folder holds none, or another run."""
        try:
            self.folder.check(self.spec)
            return self.folder.read('outcome')
        except Damaged as error:
            run_files.warn(self.folder.path / 'outcome.json', str(error))
            return {}
        except (OSError, ValueError):
            return {}

    def forget(self) -> None:
        """How the last attempt has ended, before the next one."""
        if self.last_outcome():
            (self.folder.path / 'outcome.json').unlink()


def runs(
    rows: Iterable[str],
    seeds: Iterable[int],
    workdir: str,
    load: Callable[[str, int], tuple[Spec, dict]],
    hardware: Hardware,
) -> list[Run]:
    """Every run, a whole table seed by seed; none of them where one is refused. `load` is of a row and a seed."""
    if Folder(workdir).is_claimed():
        raise Refusal(f'--workdir={workdir} holds a run; give a folder for the runs of a sweep')
    found = [read(Folder(f'{workdir}/{name(row, seed)}'), row, seed, load) for seed in seeds for row in rows]
    check(found)
    check_folders(found)
    for run in found:
        look(run, hardware)
    check(found)
    with writable(Folder(workdir).path):
        return found


def name(row: str, seed: int) -> str:
    """Of a run's folder; where there are several tables, a row is TABLE:ROW."""
    table, _, own = row.rpartition(':')
    return quote_file_name(f'{PurePath(table).stem}.{own}' if table else own) + f'-{seed}'


def read(folder: Folder, row: str, seed: int, load: Callable[[str, int], tuple[Spec, dict]]) -> Run:
    """A run as it is asked for, refused where that cannot be."""
    try:
        spec, about = load(row, seed)
    except Refusal as refusal:
        return Run(row, seed, folder, None, None, 'refused', str(refusal))
    return Run(row, seed, folder, about['size'], spec)


def check(runs: list[Run]) -> None:
    """Refuses all runs where one is refused, so that no typo is met after hours of training."""
    reasons = {run.row: run.reason for run in runs if run.outcome == 'refused'}
    if not reasons:
        return
    (row, reason), *others = reasons.items()
    if len(reasons) == len({run.row for run in runs}) and len(set(reasons.values())) == 1:
        raise Refusal(reason)
    too = f' (and so are {", ".join(other for other, _ in others)})' if others else ''
    raise Refusal(f'row {row} is refused{too}: {reason}; nothing was trained: mend that, or name other --rows')


def check_folders(runs: list[Run]) -> None:
    """Refuse two rows that would have one folder."""
    first = {}
    for run in runs:
        other = first.setdefault(run.folder.path, run)
        if other is not run:
            raise Refusal(f'rows {other.row!r} and {run.row!r} would both lie in {run.folder}; rename one of them')


def look(run: Run, hardware: Hardware) -> None:
    """What its folder knows of a run; if that is not its end, what `train` refuses of its folder and its layout."""
    from sinklab.train import layout

    end = run.spec.optimizer.steps
    try:
        instead = f'the row has changed since: give another --workdir, rename the row, or move {run.folder} away'
        run.folder.check(run.spec, instead)
        run.folder.records(end, strict=True)  # what is damaged is no result, and is not trained over
        if run.folder.is_measured(end) and digests.newest(run.folder) == end:
            run.outcome = 'done'
        elif (last := run.last_outcome()).get('kind') == 'diverged':
            run.outcome, run.reason = 'diverged', last.get('message', '')
        else:
            layout.check(run.spec, hardware, layout.asked(hardware))
    except Refusal as refusal:
        run.outcome, run.reason = 'refused', str(refusal)


def twins(runs: list[Run]) -> list[list[str]]:
    """Rows that are the same run: what differs at the paper's size may not at a smaller one."""
    rows = {}
    for run in runs:
        rows.setdefault(run.spec, []).append(run.row)
    return [list(names) for names in dict.fromkeys(map(tuple, rows.values())) if len(names) > 1]
