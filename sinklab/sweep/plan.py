"""Plan of a sweep: a run for every row and seed, with its state as found in its folder."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from sinklab.checkpoint import digests
from sinklab.config.spec import Layout, Spec
from sinklab.errors import UserError, format_names
from sinklab.escape import quote_file_name
from sinklab.run_dir import RunDir, check_run_dir


@dataclasses.dataclass
class SweepRun:
    """One row with one seed, and its outcome."""

    row: str  # with the table as TABLE:ROW if the sweep has several tables
    seed: int
    run_dir: RunDir
    row_info: dict  # the content of row.json
    spec: Spec
    outcome: str = 'to do'  # or `done`, `diverged`, `refused` or `crashed`
    reason: str = ''  # of the outcome

    def __str__(self) -> str:
        return f'{self.row}, seed {self.seed}'

    def read_last_outcome(self) -> dict:
        """Read outcome.json; return {} if it is missing or damaged, or if the folder holds another run."""
        try:
            check_run_dir(self.run_dir, self.spec)
            return self.run_dir.read_json('outcome')
        except (OSError, UserError):
            return {}


def plan_runs(
    rows: Iterable[str],
    seeds: Iterable[int],
    workdir: str,
    load: Callable[[str, int], tuple[Spec, dict]],
    layout: Layout,
) -> list[SweepRun]:
    """Plan every run of a sweep; all rows of the first seed come first.

    Args:
        rows: The names of the rows.
        seeds: The seeds.
        workdir: The folder of the sweep.
        load: Function that returns the config and the content of row.json of a row and a seed.
        layout: The layout of the devices, with which each config is checked.

    Raises:
        UserError: A row cannot be trained, two runs share a folder, or `workdir` holds a run. Then nothing is
            trained, so that a typo does not surface after hours.
    """
    if RunDir(workdir).has_run():
        raise UserError(f'--workdir={workdir} contains a run; give a folder for the runs of a sweep')
    runs: dict[Path, SweepRun] = {}
    errors: dict[str, str] = {}
    rows = list(rows)
    for seed in seeds:
        for row in rows:
            run_dir = RunDir(f'{workdir}/{get_run_dir_name(row, seed)}')
            if other := runs.get(run_dir.path):
                raise UserError(f'rows {other.row!r} and {row!r} would share {run_dir}; rename one of them')
            try:
                spec, row_info = load(row, seed)
                runs[run_dir.path] = SweepRun(row, seed, run_dir, row_info, spec)
                check_run(runs[run_dir.path], layout)
            except UserError as error:
                errors.setdefault(row, str(error))
    if not errors:
        return list(runs.values())
    (row, reason), *others = errors.items()
    if len(errors) == len(rows) and len(set(errors.values())) == 1:
        raise UserError(reason)  # about an option rather than a row
    others_text = f' (and so are {format_names([other for other, _ in others])})' if others else ''
    raise UserError(f'row {row} is refused{others_text}: {reason}; nothing was trained; fix the row, or leave it out')


def get_run_dir_name(row: str, seed: int) -> str:
    """Return the name of the folder of a run; a row of several tables is given as TABLE:ROW."""
    table_path, _, row_name = row.rpartition(':')
    return quote_file_name(f'{PurePath(table_path).stem}.{row_name}' if table_path else row_name) + f'-{seed}'


def check_run(run: SweepRun, layout: Layout) -> None:
    """Set the outcome of a run from the state of its folder.

    A run is `done` if it has an evaluation and a checkpoint at its last step.

    Raises:
        UserError: The folder is damaged or holds another run, or the layout does not divide the batch or the
            parameters, where an axis that `layout` leaves open counts as 1.
    """
    from sinklab.parallel.device_mesh import make_abstract_mesh
    from sinklab.train.device_layout import check_layout

    last_step = run.spec.optimizer.steps
    advice = f'the row has changed since: give another --workdir, rename the row, or move {run.run_dir} away'
    check_run_dir(run.run_dir, run.spec, advice)
    records = run.run_dir.read_records()
    has_evaluation = any(record['step'] == last_step and 'valid/loss' in record for record in records)
    if has_evaluation and digests.find_newest_step(run.run_dir) == last_step:
        run.outcome = 'done'
    elif (last_outcome := run.read_last_outcome()).get('kind') == 'diverged':
        run.outcome = 'diverged'
        run.reason = last_outcome.get('message', '')
    else:
        check_layout(run.spec, layout, make_abstract_mesh(layout))
