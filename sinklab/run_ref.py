"""References to runs, checkpoints and open models, as commands take them."""

import re
import shlex

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import untrusted_files
from sinklab.storage.untrusted_files import DamagedFileError

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


def format_fork(lineage: dict) -> list[str]:
    """Format the origin of a fork, and what the fork changes, as a list of short texts.

    Args:
        lineage: The entry `from` of row.json; empty for a run that is no fork, which gives [].
    """
    if not lineage:
        return []
    labels = {'new': 'new', 'dropped': 'dropped', 'reads other data': 'data'}
    details = [f'{label}: {", ".join(entries)}' for label, name in labels.items() if (entries := lineage.get(name))]
    origin = format_run_ref(lineage.get('takes', ''), lineage['run'], lineage['step'])
    return [f'from {origin}', *lineage.get('config', []), *details]


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
        if str(run_dir).startswith(MODEL_PREFIXES) or is_hf_model(run_dir):
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
            f'{run_dir} contains a run of another version ({refusal}); use commit {commit} for it'
        ) from refusal


def make_missing_run_error(run_ref: str, accepts_hf_models: bool = False) -> UserError:
    """Make the UserError for a reference that is no run folder; it says what to do for an open model.

    Args:
        run_ref: What the user gave: a path, hf:PATH_OR_ID or gguf:PATH.
        accepts_hf_models: Whether the command also takes hf:PATH_OR_ID and gguf:PATH.
    """
    has_prefix, run_dir = run_ref.startswith(MODEL_PREFIXES), RunDir(run_ref)
    is_gguf_file = not has_prefix and run_ref.endswith('.gguf') and run_dir.path.is_file()
    if has_prefix or is_gguf_file or is_hf_model(run_dir):
        problem = 'is an open model' if has_prefix or is_gguf_file else 'contains an open model'
        model_ref = run_ref if has_prefix else f'{GGUF_PREFIX if is_gguf_file else HF_PREFIX}{run_ref}'
        if accepts_hf_models:
            return UserError(f'{run_ref} {problem}; give {shlex.join([model_ref])}')
        import_command = shlex.join(['sinklab', 'checkpoint', 'import', model_ref, '--out=runs/imported'])
        return UserError(
            f'{run_ref} {problem}, but a run is needed; make a run of it with {import_command}, '
            'and give runs/imported'
        )
    problem = 'contains no run' if run_dir.path.exists() else 'does not exist'
    if not accepts_hf_models:
        return UserError(f'{run_ref} {problem}; give the folder of a run')
    is_hub_id = re.fullmatch(r'[\w-]+/[\w.-]+', run_ref)
    hf_ref = shlex.join([f'{HF_PREFIX}{run_ref}']) if is_hub_id else f'{HF_PREFIX}PATH_OR_ID'
    return UserError(f'{run_ref} {problem}; give the folder of a run, or {hf_ref} for an open model')


def is_hf_model(run_dir: RunDir) -> bool:
    """Return whether a folder has the config.json of a transformers model."""
    try:
        return 'model_type' in untrusted_files.read_json(run_dir.path / 'config.json')
    except (OSError, UserError):
        return False
