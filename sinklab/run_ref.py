"""Parsing of run references, RUN[@STEP], and reading of the run they refer to."""

import re

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.escape import join_shell
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
from sinklab.storage import untrusted_files
from sinklab.storage.untrusted_files import DamagedFileError

HF_PREFIX = 'hf:'  # prefix of an open model: hf:FOLDER, or hf:ID on the Hugging Face Hub


def parse_run_ref(run_ref: str) -> tuple[RunDir, int | None]:
    """Parse RUN[@STEP] into a run directory and a step.

    The name of a run folder may contain @: if `run_ref` as a whole is a run folder, no step is split off.

    Returns:
        The run directory, and the step; None if no step is given.
    """
    path, _, step = run_ref.rpartition('@')
    run_dir = RunDir(run_ref)
    if not path or not step.isdecimal() or run_dir.has_run() or run_dir.list_checkpoint_steps():
        return run_dir, None
    return RunDir(path), int(step)


def select_steps(run_dir: RunDir, step: int | None) -> list[int]:
    """Return the given step if it has a checkpoint, or all steps with a checkpoint if `step` is None.

    Raises:
        UserError: The folder is no run, it has no checkpoints, or it has none of this step.
    """
    saved_steps = run_dir.list_checkpoint_steps()
    if not saved_steps:
        if str(run_dir).startswith(HF_PREFIX) or is_hf_model(run_dir):
            raise make_missing_run_error(str(run_dir))
        raise UserError(f'{run_dir} has no checkpoints; give the folder of a run that has saved some')
    if step is None:
        return saved_steps
    if step not in saved_steps:
        raise UserError(f'{run_dir} has no checkpoint {step}; it has: {", ".join(map(str, saved_steps))}')
    return [step]


def read_spec(run_dir: RunDir) -> Spec:
    """Read the spec of a run from its config.json.

    Raises:
        DamagedFileError: config.json is damaged.
        UserError: The folder is no run, or the config is one of another version of sinklab.
    """
    try:
        return parse_config(run_dir.read_json('config'))
    except FileNotFoundError as error:
        raise make_missing_run_error(str(run_dir)) from error
    except DamagedFileError:
        raise
    except UserError as refusal:
        if is_hf_model(run_dir):
            raise make_missing_run_error(str(run_dir)) from refusal
        commit = run_dir.read_environment().get('commit')
        raise UserError(
            f'{run_dir} holds a run of another version ({refusal}); go on from it with commit {commit}'
        ) from refusal


def make_missing_run_error(run_ref: str, accepts_hf_models: bool = False) -> UserError:
    """Make the UserError for a reference that is no run folder; it says what to do for an open model.

    Args:
        run_ref: What the user gave: a path, or hf:PATH_OR_ID.
        accepts_hf_models: Whether the command also takes hf:PATH_OR_ID.
    """
    name = run_ref.removeprefix(HF_PREFIX)
    run_dir = RunDir(name)
    if run_ref != name or is_hf_model(run_dir):
        problem = 'is an open model' if run_ref != name else 'holds an open model'
        if accepts_hf_models:
            return UserError(f'{run_ref} {problem}; give {join_shell([f"{HF_PREFIX}{name}"])}')
        import_command = join_shell(['sinklab', 'checkpoint', 'import', f'{HF_PREFIX}{name}', '--out=runs/imported'])
        return UserError(
            f'{run_ref} {problem}, and only runs are read here; make a run of it by {import_command}, '
            'and give runs/imported'
        )
    problem = 'holds no run' if run_dir.path.exists() else 'is not there'
    if not accepts_hf_models:
        return UserError(f'{run_ref} {problem}; give the folder of a run')
    hf_ref = join_shell([f'{HF_PREFIX}{name}']) if re.fullmatch(r'[\w-]+/[\w.-]+', name) else f'{HF_PREFIX}PATH_OR_ID'
    return UserError(f'{run_ref} {problem}; give the folder of a run, or {hf_ref} for an open model')


def is_hf_model(run_dir: RunDir) -> bool:
    """Return whether a folder has the config.json of a transformers model."""
    try:
        return 'model_type' in untrusted_files.read_json(run_dir.path / 'config.json')
    except (OSError, UserError):
        return False
