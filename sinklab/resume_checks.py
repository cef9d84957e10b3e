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
    if changed == [STEPS_FIELD] and spec.optimizer.schedule in EXTENDABLE_SCHEDULES:
        reached_steps = [*run_dir.list_checkpoint_steps(), *(record['step'] for record in run_dir.read_records())]
        if spec.optimizer.steps < (reached_step := max(reached_steps, default=0)):
            raise UserError(
                f'{run_dir} is at step {reached_step}, but config.{STEPS_FIELD} is {spec.optimizer.steps}; '
                f'give at least {reached_step}'
            )
    elif changed == [STEPS_FIELD]:
        raise UserError(
            f'{run_dir}: the learning rates of a {spec.optimizer.schedule} schedule depend on the number of steps, '
            f'so config.{STEPS_FIELD} cannot change from {saved_config[STEPS_FIELD]} to {spec.optimizer.steps}; '
            f'start another run with {shlex.quote(f"--from={run_dir}")}, or {advice}'
        )
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
