"""Checks of a run folder before a run starts or resumes in it."""

import dataclasses
import shlex

from sinklab.config.differences import flatten_dict, format_differences
from sinklab.config.spec import EXTENDABLE_SCHEDULES, Spec, is_changeable
from sinklab.errors import UserError
from sinklab.run_dir import RUN_FILES, RunDir
from sinklab.storage import untrusted_files
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX
from sinklab.storage.directories import list_entries
from sinklab.storage.paths import check_path_readable_by_orbax, is_remote
from sinklab.storage.untrusted_files import DamagedFileError

# Files that a folder may contain before config.json exists: those of the job that works there, and those that an
# interrupted `initialize` has left.
FILES_BEFORE_CONFIG = (
    'lease.json',
    'lease.lock',
    'digests',
    'damaged',
    'probe',
    'row.json',
    'run.json',
    'tokenizer.json',
)
STEPS_FIELD = 'optimizer.steps'


def check_run_dir(run_dir: RunDir, spec: Spec, remedy: str | None = None) -> None:
    """Raise UserError if a folder holds another run or other files, or cannot hold checkpoints.

    Args:
        run_dir: The folder.
        spec: The spec of the run that is to train in it.
        remedy: Advice for the case that the folder holds another run; None: give a new folder.
    """
    check_path_readable_by_orbax(run_dir.path)
    if not run_dir.path.exists():
        return
    if not run_dir.path.is_dir():
        raise UserError(f'{run_dir} is a file; give a folder as --workdir')
    if not run_dir.has_run():
        foreign_entries = [
            path
            for path in list_entries(run_dir.path)
            if path.name not in FILES_BEFORE_CONFIG and path.suffix != TEMPORARY_SUFFIX
        ]
        if foreign_entries:
            raise UserError(
                f'{run_dir} contains files but no run ({foreign_entries[0].name}); give a new folder, e.g. '
                f'{shlex.quote(f"--workdir={run_dir}/run")}'
            )
        return
    check_files(run_dir)
    saved_config, new_config = load_flat_configs(run_dir, spec)
    advice = remedy or f'give a new folder, e.g. {shlex.quote(f"--workdir={run_dir}-2")}'
    if new_config.keys() != saved_config.keys():
        removed_fields, missing_fields = (
            ', '.join(sorted(config.keys() - other_config))
            for config, other_config in ((saved_config, new_config), (new_config, saved_config))
        )
        mismatches = filter(
            None,
            (
                removed_fields and f'has the unknown fields {removed_fields}',
                missing_fields and f'lacks {missing_fields}',
            ),
        )
        raise UserError(
            f'{run_dir} contains a run of another version, whose config {" and ".join(mismatches)}; use commit '
            f'{run_dir.read_environment().get("commit")}, or {advice}'
        )
    mismatches = [key for key in new_config if new_config[key] != saved_config[key] and not is_changeable(key)]
    if mismatches == [STEPS_FIELD]:
        check_step_change(run_dir, spec, saved_config[STEPS_FIELD], remedy)
    elif mismatches:
        scaling_note = explain_scaling(run_dir, mismatches, saved_config)
        raise UserError(
            f'{run_dir} contains another run '
            f'({"; ".join(format_differences(saved_config, new_config))}{scaling_note}); {advice}'
        )


def check_files(run_dir: RunDir) -> None:
    """Raise DamagedFileError if a file of the run is no regular file, such as a folder or a FIFO."""
    if is_remote(run_dir.path):
        return
    probes = run_dir.path / 'probe'
    if probes.exists() and not probes.is_dir():
        raise DamagedFileError(f'{probes} is a file instead of a folder; move it away')
    for file in (*(run_dir.path / name for name in (*RUN_FILES, 'lease.lock')), *probes.glob('*.npz')):
        untrusted_files.check_regular_file(file)


def load_flat_configs(run_dir: RunDir, spec: Spec) -> tuple[dict, dict]:
    """Return the saved config of the run and the config of `spec`, both flattened to dotted keys.

    If both read a token store, the saved config gets the new path of the store, so that the paths do not differ.
    """
    saved_config, new_config = flatten_dict(run_dir.read_json('config')), flatten_dict(dataclasses.asdict(spec))
    if all(config.get('data.source', '').startswith('store:') for config in (saved_config, new_config)):
        saved_config['data.source'] = new_config[
            'data.source'
        ]  # a checkpoint identifies the store by its digest, not by its path
    return saved_config, new_config


def list_changes(run_dir: RunDir, spec: Spec) -> list[str]:
    """Return the config fields that differ from the saved config of the run."""
    return format_differences(*load_flat_configs(run_dir, spec))


def explain_scaling(run_dir: RunDir, mismatches: list[str], saved_config: dict) -> str:
    """Describe mismatches that exist because an older version scaled the numbers of a row with the size.

    Such a field has different numbers in row.json and in config.json.

    Returns:
        The note for the error message; '' if no field was scaled.
    """
    try:
        row = run_dir.read_json('row')
    except (OSError, ValueError):
        return ''
    row_values = {path: row.get('diff', {}).get(path) for path in mismatches if path not in row.get('overrides', {})}
    scaled_values = [
        f'{path!r}: {value!r}'
        for path, value in row_values.items()
        if type(value) in (int, float) and value != saved_config[path]
    ]
    if not scaled_values:
        return ''
    return f'; that run was scaled with its size, as scale_with_size({{{", ".join(scaled_values)}}}) in the row does'


def check_step_change(run_dir: RunDir, spec: Spec, saved_steps: int, remedy: str | None = None) -> None:
    """Raise UserError if a new number of steps would change steps that are already done.

    Args:
        run_dir: The folder of the run.
        spec: The spec with the new number of steps.
        saved_steps: The number of steps in the saved config.
        remedy: Advice for the case that the schedule cannot be extended; None: fork the run or give a new folder.
    """
    steps, schedule, checkpoint_steps = (
        spec.optimizer.steps,
        spec.optimizer.schedule,
        run_dir.list_checkpoint_steps(),
    )
    reached_step = max(
        [*checkpoint_steps, *(record['step'] for record in run_dir.read_records(saved_steps, strict=True))],
        default=0,
    )
    if schedule in EXTENDABLE_SCHEDULES and steps < reached_step:
        raise UserError(
            f'{run_dir} is at step {reached_step}, but config.{STEPS_FIELD} is {steps}; give at least {reached_step}'
        )
    if schedule not in EXTENDABLE_SCHEDULES:
        fork_flags = (
            [f'--from={run_dir}@{checkpoint_steps[-1]}', f'--config.{STEPS_FIELD}={steps}']
            if checkpoint_steps
            else []
        )
        remedy_text = 'fork it' if checkpoint_steps else 'give a new folder'
        advice = f'{remedy_text}: {shlex.join([*fork_flags, f"--workdir={run_dir}-2"])}'
        raise UserError(
            f'{run_dir}: the learning rates of a {schedule} schedule depend on the number of steps, so '
            f'config.{STEPS_FIELD} cannot change from {saved_steps} to {steps}; {remedy or advice}'
        )
