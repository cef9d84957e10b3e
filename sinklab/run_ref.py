"""References to runs, checkpoints and open models, as commands take them."""

import shlex

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage.files import DamagedFileError

# Prefixes of open models: hf:FOLDER, hf:ID on the Hugging Face Hub, or gguf:FILE.
HF_PREFIX, GGUF_PREFIX = MODEL_PREFIXES = 'hf:', 'gguf:'


def format_run_ref(takes: str, run_path: object, step: int | str) -> str:
    """Format a checkpoint as a value of --from: [TAKES:]RUN@STEP.

    Args:
        takes: What a warm start takes from the checkpoint, such as 'params'; '': all of it.
        run_path: The run folder.
        step: The step of the checkpoint, or a placeholder.
    """
    return f'{takes and f"{takes}:"}{run_path}@{step}'


def format_parent(parent: dict) -> list[str]:
    """Format the parent of a warm start, and what the warm start changes, as a list of short texts.

    Args:
        parent: The entry `from` of row.json; empty for a run that is no warm start, which gives [].
    """
    if not parent:
        return []
    labels = {'new': 'new', 'dropped': 'dropped', 'data': 'reads other data'}
    details = [f'{label}: {", ".join(entries)}' for name, label in labels.items() if (entries := parent.get(name))]
    parent_ref = format_run_ref(parent.get('takes', ''), parent['run'], parent['step'])
    return [f'from {parent_ref}', *parent.get('config', []), *details]


def parse_run_ref(run_ref: str) -> tuple[RunDir, int | None]:
    """Parse RUN[@STEP] into a run directory and a step; None if no step is given.

    The name of a run folder may contain @: if `run_ref` as a whole is a run folder, no step is split off.
    """
    path, _, step = run_ref.rpartition('@')
    if not path or not step.isdecimal() or RunDir(run_ref).has_run():
        return RunDir(run_ref), None
    return RunDir(path), int(step)


def select_steps(run_dir: RunDir, step: int | None) -> list[int]:
    """Return the given step if it has a checkpoint, or all steps with a checkpoint if `step` is None.

    Raises:
        UserError: The folder is no run, it has no checkpoints, or it has none of this step.
    """
    saved_steps = run_dir.list_checkpoint_steps()
    if not saved_steps:
        if not run_dir.has_run() or is_hf_model(run_dir):
            raise make_missing_run_error(str(run_dir))
        raise UserError(f'{run_dir} has no checkpoints; give the folder of a run that has saved some')
    if step not in (None, *saved_steps):
        raise UserError(f'{run_dir} has no checkpoint {step}; it has: {", ".join(map(str, saved_steps))}')
    return saved_steps if step is None else [step]


def read_spec(run_dir: RunDir) -> Spec:
    """Read the spec of a run from its config.json.

    Raises:
        DamagedFileError: config.json is damaged.
        UserError: The folder is no run, or the config is one of another version of sinklab.
    """
    try:
        return parse_config(run_dir.read_json('config'))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise make_missing_run_error(str(run_dir)) from error
    except DamagedFileError:
        raise
    except UserError as error:
        if is_hf_model(run_dir):
            raise make_missing_run_error(str(run_dir)) from error
        commit = run_dir.read_environment().get('commit')
        raise UserError(f'{run_dir} contains a run of another version ({error}); use commit {commit}') from error


def make_missing_run_error(run_ref: str, accepts_hf_models: bool = False) -> UserError:
    """Make the UserError for a reference that is no run folder; it says what to do for an open model.

    Args:
        run_ref: What the user gave: a path, hf:PATH_OR_ID or gguf:PATH.
        accepts_hf_models: Whether the command also takes hf:PATH_OR_ID and gguf:PATH.
    """
    problem = 'contains no run' if RunDir(run_ref).path.exists() else 'does not exist'
    is_model = is_hf_model(RunDir(run_ref))
    if accepts_hf_models:
        allowed_refs = HF_PREFIX + run_ref if is_model else 'hf:PATH_OR_ID or gguf:PATH'
        return UserError(f'{run_ref} {problem}; give the folder of a run, or {allowed_refs}')
    if run_ref.startswith(MODEL_PREFIXES) or is_model:
        model_ref = run_ref if run_ref.startswith(MODEL_PREFIXES) else HF_PREFIX + run_ref
        import_command = shlex.join(['sinklab', 'checkpoint', 'import', model_ref, '--out=runs/imported'])
        return UserError(f'{run_ref} is an open model, and a run is needed; make one with {import_command}')
    return UserError(f'{run_ref} {problem}; give the folder of a run')


def is_hf_model(run_dir: RunDir) -> bool:
    """Return whether a folder has the config.json of a transformers model."""
    try:
        return 'model_type' in run_dir.read_json('config')
    except (OSError, UserError):
        return False
