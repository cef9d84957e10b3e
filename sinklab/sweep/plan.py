"""The runs of a sweep before it begins: every row with every seed, and what their folders know of them."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import PurePath

from sinklab.checkpoint import digests
from sinklab.config.seeds import format_seeds, parse_seeds
from sinklab.config.spec import Hardware, Spec
from sinklab.escape import quote_file_name
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
from sinklab.storage import run_files
from sinklab.storage.atomic_write import writable_folder
from sinklab.storage.untrusted_files import DamagedFileError


def check_seed_count(option: str, rows: Iterable[str], workdir: str) -> None:
    """Refuse a count N where a row has a run of seed N and none of seeds before: N alone once meant that seed."""
    if ',' in option:
        return
    seeds = parse_seeds(option)

    def has_begun(row: str, seed: int) -> bool:
        return RunDir(f'{workdir}/{get_run_dir_name(row, seed)}').has_run()

    for row in rows:
        if has_begun(row, len(seeds)) and not any(has_begun(row, seed) for seed in seeds):
            raise UserError(
                f'--seeds={option} is a count (seeds {format_seeds(seeds)}), and {workdir} has row {row} with seed '
                f'{option} alone; go on with that by --seeds={option},'
            )


@dataclasses.dataclass
class SweepRun:
    """One row with one seed, and what has become of it: to do, done, diverged, refused or crashed."""

    row: str
    seed: int
    run_dir: RunDir
    size: str | None
    spec: Spec | None
    outcome: str = 'to do'
    reason: str = ''

    def __str__(self) -> str:
        return f'{self.row}, seed {self.seed}'

    def read_last_outcome(self) -> dict:
        """Its outcome.json; nothing where the folder holds none, or another run."""
        try:
            self.run_dir.check_spec(self.spec)
            return self.run_dir.read_json('outcome')
        except DamagedFileError as error:
            run_files.warn_once(self.run_dir.path / 'outcome.json', str(error))
            return {}
        except (OSError, ValueError):
            return {}

    def delete_outcome(self) -> None:
        """How the last attempt has ended, before the next one."""
        if self.read_last_outcome():
            (self.run_dir.path / 'outcome.json').unlink()


def plan_runs(
    rows: Iterable[str],
    seeds: Iterable[int],
    workdir: str,
    load: Callable[[str, int], tuple[Spec, dict]],
    hardware: Hardware,
) -> list[SweepRun]:
    """Every run, a whole table seed by seed; none of them where one is refused. `load` is of a row and a seed."""
    if RunDir(workdir).has_run():
        raise UserError(f'--workdir={workdir} holds a run; give a folder for the runs of a sweep')
    planned = [
        plan_run(RunDir(f'{workdir}/{get_run_dir_name(row, seed)}'), row, seed, load)
        for seed in seeds
        for row in rows
    ]
    check_refused(planned)
    check_run_dirs(planned)
    for run in planned:
        check_run(run, hardware)
    check_refused(planned)
    with writable_folder(RunDir(workdir).path):
        return planned


def get_run_dir_name(row: str, seed: int) -> str:
    """Of a run's folder; where there are several tables, a row is TABLE:ROW."""
    table_path, _, row_name = row.rpartition(':')
    return quote_file_name(f'{PurePath(table_path).stem}.{row_name}' if table_path else row_name) + f'-{seed}'


def plan_run(run_dir: RunDir, row: str, seed: int, load: Callable[[str, int], tuple[Spec, dict]]) -> SweepRun:
    """A run as it is asked for, refused where that cannot be."""
    try:
        spec, row_info = load(row, seed)
    except UserError as refusal:
        return SweepRun(row, seed, run_dir, None, None, 'refused', str(refusal))
    return SweepRun(row, seed, run_dir, row_info['size'], spec)


def check_refused(runs: list[SweepRun]) -> None:
    """Refuses all runs where one is refused, so that no typo is met after hours of training."""
    reasons = {run.row: run.reason for run in runs if run.outcome == 'refused'}
    if not reasons:
        return
    (row, reason), *others = reasons.items()
    if len(reasons) == len({run.row for run in runs}) and len(set(reasons.values())) == 1:
        raise UserError(reason)
    others_text = f' (and so are {", ".join(other for other, _ in others)})' if others else ''
    raise UserError(
        f'row {row} is refused{others_text}: {reason}; nothing was trained: mend that, or name other --rows'
    )


def check_run_dirs(runs: list[SweepRun]) -> None:
    """Refuse two rows that would have one folder."""
    first_of_path = {}
    for run in runs:
        other = first_of_path.setdefault(run.run_dir.path, run)
        if other is not run:
            raise UserError(f'rows {other.row!r} and {run.row!r} would both lie in {run.run_dir}; rename one of them')


def check_run(run: SweepRun, hardware: Hardware) -> None:
    """What its folder knows of a run; if that is not its end, what `train` refuses of its folder and its layout."""
    from sinklab.train import setup

    last_step = run.spec.optimizer.steps
    try:
        advice = f'the row has changed since: give another --workdir, rename the row, or move {run.run_dir} away'
        run.run_dir.check_spec(run.spec, advice)
        run.run_dir.read_records(last_step, strict=True)  # what is damaged is no result, and is not trained over
        if run.run_dir.has_evaluation(last_step) and digests.find_newest_step(run.run_dir) == last_step:
            run.outcome = 'done'
        elif (last_outcome := run.read_last_outcome()).get('kind') == 'diverged':
            run.outcome, run.reason = 'diverged', last_outcome.get('message', '')
        else:
            setup.check_layout(run.spec, hardware, setup.make_requested_mesh(hardware))
    except UserError as refusal:
        run.outcome, run.reason = 'refused', str(refusal)


def find_duplicate_rows(runs: list[SweepRun]) -> list[list[str]]:
    """Rows that are the same run: what differs at the paper's size may not at a smaller one."""
    rows_of_spec = {}
    for run in runs:
        rows_of_spec.setdefault(run.spec, []).append(run.row)
    return [list(names) for names in dict.fromkeys(map(tuple, rows_of_spec.values())) if len(names) > 1]
