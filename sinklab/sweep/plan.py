"""Plan of a sweep: a run for every row and seed, with its state as found in its folder."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import PurePath

from sinklab.checkpoint import digests
from sinklab.config.seed_list import format_seeds, parse_seeds
from sinklab.config.spec import Hardware, Spec
from sinklab.errors import UserError, format_names
from sinklab.escape import quote_file_name
from sinklab.resume_checks import check_run_dir
from sinklab.run_dir import RunDir
from sinklab.storage import run_file_schemas
from sinklab.storage.untrusted_files import DamagedFileError


def check_seed_count(option: str, rows: Iterable[str], workdir: str) -> None:
    """Refuse a seed count N if a row has a run with seed N and none with a lower seed.

    In earlier versions --seeds=N meant the single seed N, so such a folder belongs to that seed.

    Args:
        option: The value of --seeds.
        rows: The names of the rows.
        workdir: The folder of the sweep.

    Raises:
        UserError: A row has only a run with seed N.
    """
    if ',' in option:
        return
    seeds = parse_seeds(option)

    def has_begun(row: str, seed: int) -> bool:
        return RunDir(f'{workdir}/{get_run_dir_name(row, seed)}').has_run()

    for row in rows:
        if has_begun(row, len(seeds)) and not any(has_begun(row, seed) for seed in seeds):
            raise UserError(
                f'--seeds={option} is a count (seeds {format_seeds(seeds)}), but {workdir} has row {row} only with '
                f'seed {option}; resume that with --seeds={option},'
            )


def check_config_file(config: str, workdir: str) -> None:
    """Raise UserError if a folder has the table of a sweep of a config file with another name.

    The sweep would replace that table.
    """
    try:
        rows = RunDir(workdir).read_json('sweep')
    except (OSError, DamagedFileError):
        return
    other = next((row['config'] for row in rows if row.get('config')), config)
    if PurePath(other).name != PurePath(config).name:
        raise UserError(
            f'{workdir} contains a sweep of {other}, and --config={config} is given; give another --workdir, '
            f'or delete {workdir}/sweep.json if the file was renamed'
        )


@dataclasses.dataclass
class SweepRun:
    """One row with one seed, and its outcome.

    Attributes:
        row: The name of the row, with the table as TABLE:ROW if the sweep has several tables.
        seed: The seed.
        run_dir: The folder of the run.
        size: The name of the model size. None if the config cannot be loaded.
        spec: The config of the run. None if it cannot be loaded.
        outcome: `to do`, `done`, `diverged`, `refused` or `crashed`.
        reason: The reason of the outcome, if it has one.
    """

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
        """Read outcome.json; return {} if it is missing or damaged, or if the folder holds another run."""
        try:
            check_run_dir(self.run_dir, self.spec)
            return self.run_dir.read_json('outcome')
        except DamagedFileError as error:
            run_file_schemas.warn_once(self.run_dir.path / 'outcome.json', str(error))
            return {}
        except (OSError, ValueError):
            return {}

    def delete_outcome(self) -> None:
        """Delete outcome.json of the last attempt, if there is one; call this before the next attempt."""
        if self.read_last_outcome():
            (self.run_dir.path / 'outcome.json').unlink()


def plan_runs(
    rows: Iterable[str],
    seeds: Iterable[int],
    workdir: str,
    load: Callable[[str, int], tuple[Spec, dict]],
    hardware: Hardware,
) -> list[SweepRun]:
    """Plan every run of a sweep; all rows of the first seed come first.

    Args:
        rows: The names of the rows.
        seeds: The seeds.
        workdir: The folder of the sweep.
        load: Function that returns the config and the content of row.json of a row and a seed.
        hardware: The layout of the devices, with which each config is checked.

    Raises:
        UserError: A run is refused, two runs share a folder, or `workdir` holds a run. Then no run is planned.
    """
    if RunDir(workdir).has_run():
        raise UserError(f'--workdir={workdir} contains a run; give a folder for the runs of a sweep')
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
    return planned


def get_run_dir_name(row: str, seed: int) -> str:
    """Return the name of the folder of a run; a row of several tables is given as TABLE:ROW."""
    table_path, _, row_name = row.rpartition(':')
    return quote_file_name(f'{PurePath(table_path).stem}.{row_name}' if table_path else row_name) + f'-{seed}'


def plan_run(run_dir: RunDir, row: str, seed: int, load: Callable[[str, int], tuple[Spec, dict]]) -> SweepRun:
    """Plan one run; its outcome is `refused` if its config cannot be loaded."""
    try:
        spec, row_info = load(row, seed)
    except UserError as refusal:
        return SweepRun(row, seed, run_dir, None, None, 'refused', str(refusal))
    return SweepRun(row, seed, run_dir, row_info['size'], spec)


def check_refused(runs: list[SweepRun]) -> None:
    """Raise UserError if any run is refused, so that a typo does not surface after hours of training."""
    reasons = {run.row: run.reason for run in runs if run.outcome == 'refused'}
    if not reasons:
        return
    (row, reason), *others = reasons.items()
    if len(reasons) == len({run.row for run in runs}) and len(set(reasons.values())) == 1:
        raise UserError(reason)
    others_text = f' (and so are {format_names([other for other, _ in others])})' if others else ''
    raise UserError(f'row {row} is refused{others_text}: {reason}; nothing was trained; fix the row, or leave it out')


def check_run_dirs(runs: list[SweepRun]) -> None:
    """Raise UserError if two runs would have the same folder."""
    first_of_path = {}
    for run in runs:
        other = first_of_path.setdefault(run.run_dir.path, run)
        if other is not run:
            raise UserError(f'rows {other.row!r} and {run.row!r} would share {run.run_dir}; rename one of them')


def check_run(run: SweepRun, hardware: Hardware) -> None:
    """Set the outcome of a run from the state of its folder.

    A run is `done` if it has an evaluation and a checkpoint at its last step. A run that has neither finished nor
    diverged is `refused` if its layout does not divide batch or parameters, where an axis that `hardware` leaves open
    counts as 1. A run is also `refused` if its folder is damaged or holds another run.
    """
    from sinklab.parallel.device_mesh import make_abstract_mesh
    from sinklab.train.memory_estimate import check_layout

    last_step = run.spec.optimizer.steps
    try:
        advice = f'the row has changed since: give another --workdir, rename the row, or move {run.run_dir} away'
        check_run_dir(run.run_dir, run.spec, advice)
        run.run_dir.read_records(last_step, strict=True)  # damaged records are no result and must not be overwritten
        if run.run_dir.has_evaluation(last_step) and digests.find_newest_step(run.run_dir) == last_step:
            run.outcome = 'done'
        elif (last_outcome := run.read_last_outcome()).get('kind') == 'diverged':
            run.outcome, run.reason = 'diverged', last_outcome.get('message', '')
        else:
            check_layout(run.spec, hardware, make_abstract_mesh(hardware))
    except UserError as refusal:
        run.outcome, run.reason = 'refused', str(refusal)


def find_duplicate_rows(runs: list[SweepRun]) -> list[list[str]]:
    """Find groups of rows with equal configs.

    Rows that differ at the size of the paper may be equal at a smaller size.
    """
    rows_of_spec = {}
    for run in runs:
        rows_of_spec.setdefault(run.spec, []).append(run.row)
    return [list(names) for names in dict.fromkeys(map(tuple, rows_of_spec.values())) if len(names) > 1]
