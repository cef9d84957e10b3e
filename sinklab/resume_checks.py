"""Checks of a run folder before a run starts or resumes in it."""

import dataclasses
import shlex

from sinklab.config.differences import flatten_dict, format_differences
from sinklab.config.spec import EXTENDABLE_SCHEDULES, Spec, is_changeable
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.files import TEMPORARY_SUFFIX, list_entries
from sinklab.storage.folder_lock import LOCK_FILE, OWNER_FILE
from sinklab.storage.paths import check_checkpoint_path

# Entries of a folder in which a run has not yet written its config.json.
ENTRIES_BEFORE_CONFIG = LOCK_FILE, OWNER_FILE, 'probe', 'row.json', 'tokenizer.json', 'outcome.json'
STEPS_FIELD = 'optimizer.steps'


def check_run_dir(run_dir: RunDir, spec: Spec, remedy: str | None = None) -> None:
    """Raise UserError if a folder holds another run or other files, or cannot hold checkpoints.

    Args:
        run_dir: The folder.
        spec: The spec of the run that is to train in it.
        remedy: Advice for the case that the folder holds another run; None: give a new folder.
    """
    check_checkpoint_path(run_dir.path)
    if run_dir.path.is_file():
        raise UserError(f'{run_dir} is a file; give a folder as --workdir')
    if not run_dir.has_run():
        for path in list_entries(run_dir.path):
            if path.name not in ENTRIES_BEFORE_CONFIG and path.suffix != TEMPORARY_SUFFIX:
                new_dir = shlex.quote(f'--workdir={run_dir}/run')
                raise UserError(
                    f'{run_dir} contains files but no run ({path.name}); give a new folder, e.g. {new_dir}'
                )
        return
    saved_config, new_config = load_flat_configs(run_dir, spec)
    advice = remedy or f'give a new folder, e.g. {shlex.quote(f"--workdir={run_dir}-2")}'
    if names := sorted(new_config.keys() ^ saved_config.keys()):
        raise UserError(
            f'{run_dir} contains a run of another version of sinklab, with other config fields ({", ".join(names)}); '
            f'use commit {run_dir.read_environment().get("commit")}, or {advice}'
        )
    changed = [name for name in new_config if new_config[name] != saved_config[name] and not is_changeable(name)]
    if changed == [STEPS_FIELD]:
        check_step_change(run_dir, spec, saved_config[STEPS_FIELD], remedy)
    elif changed:
        differences = '; '.join(format_differences(saved_config, new_config))
        raise UserError(f'{run_dir} contains another run ({differences}); {advice}')


def load_flat_configs(run_dir: RunDir, spec: Spec) -> tuple[dict, dict]:
    """Return the saved config of the run and the config of `spec`, both flattened to dotted keys.

    A token store may have moved: a checkpoint identifies it by its digest, not by its path.
    """
    saved_config, new_config = flatten_dict(run_dir.read_json('config')), flatten_dict(dataclasses.asdict(spec))
    if all(str(config.get('data.source')).startswith('store:') for config in (saved_config, new_config)):
        saved_config['data.source'] = new_config['data.source']
    return saved_config, new_config


def list_changes(run_dir: RunDir, spec: Spec) -> list[str]:
    """Return the config fields that differ from the saved config of the run."""
    return format_differences(*load_flat_configs(run_dir, spec))


def check_step_change(run_dir: RunDir, spec: Spec, saved_steps: int, remedy: str | None = None) -> None:
    """Raise UserError if a new number of steps would change steps that are already done.

    Args:
        run_dir: The folder of the run.
        spec: The spec with the new number of steps.
        saved_steps: The number of steps in the saved config.
        remedy: Advice for the case that the schedule cannot be extended; None: fork the run or give a new folder.
    """
    steps, schedule = spec.optimizer.steps, spec.optimizer.schedule
    checkpoint_steps = run_dir.list_checkpoint_steps()
    if schedule not in EXTENDABLE_SCHEDULES:
        fork = (
            [f'--from={run_dir}@{checkpoint_steps[-1]}', f'--config.{STEPS_FIELD}={steps}']
            if checkpoint_steps
            else []
        )
        options = shlex.join([*fork, f'--workdir={run_dir}-2'])
        advice = f'{"fork it" if fork else "give a new folder"}: {options}'
        raise UserError(
            f'{run_dir}: the learning rates of a {schedule} schedule depend on the number of steps, so '
            f'config.{STEPS_FIELD} cannot change from {saved_steps} to {steps}; {remedy or advice}'
        )
    reached_step = max([*checkpoint_steps, *(record['step'] for record in run_dir.read_records())], default=0)
    if steps < reached_step:
        raise UserError(
            f'{run_dir} is at step {reached_step}, but config.{STEPS_FIELD} is {steps}; give at least {reached_step}'
        )
