"""RUN[@STEP], as a person names a run or one of its checkpoints."""

import re

from sinklab.escape import join_shell
from sinklab.files import validation
from sinklab.files.regular import Damaged
from sinklab.folder import Folder
from sinklab.parse import parse
from sinklab.record import Refusal
from sinklab.spec import Spec

OPEN = 'hf:'  # before the folder of an open model, or its name on the Hugging Face hub


def run_and_step(given: str) -> tuple[Folder, int | None]:
    """The folder, and the step where one is named: what holds a run as a whole has the @ in its name."""
    path, _, step = given.rpartition('@')
    whole = Folder(given)
    if not path or not step.isdecimal() or whole.is_claimed() or whole.checkpoint_steps():
        return whole, None
    return Folder(path), int(step)


def wanted(folder: Folder, step: int | None) -> list[int]:
    """The steps that are meant: the one that is named, or all that were saved."""
    saved = folder.checkpoint_steps()
    if not saved:
        if str(folder).startswith(OPEN) or is_open_model(folder):
            raise missing_run(str(folder))
        raise Refusal(f'{folder} has no checkpoints; give the folder of a run that has saved some')
    if step is None:
        return saved
    if step not in saved:
        raise Refusal(f'{folder} has no checkpoint {step}; it has: {", ".join(map(str, saved))}')
    return [step]


def spec_of(folder: Folder) -> Spec:
    """The spec of a run."""
    try:
        return parse(folder.read('config'))
    except FileNotFoundError as error:
        raise missing_run(str(folder)) from error
    except Damaged:
        raise
    except Refusal as refusal:
        if is_open_model(folder):
            raise missing_run(str(folder)) from refusal
        commit = folder.environment().get('commit')
        raise Refusal(
            f'{folder} holds a run of another version ({refusal}); go on from it with commit {commit}'
        ) from refusal


def missing_run(given: str, reads_open_models: bool = False) -> Refusal:
    """Return the refusal of a name that is no run folder, with what to do where it is an open model.

    Args:
        given: what the user gave: a path, or hf:PATH_OR_ID.
        reads_open_models: whether the command also takes hf:PATH_OR_ID.
    """
    name = given.removeprefix(OPEN)
    folder = Folder(name)
    if given != name or is_open_model(folder):
        lacks = 'is an open model' if given != name else 'holds an open model'
        if reads_open_models:
            return Refusal(f'{given} {lacks}; give {join_shell([f"{OPEN}{name}"])}')
        imported = join_shell(['sinklab', 'checkpoint', 'import', f'{OPEN}{name}', '--out=runs/imported'])
        return Refusal(
            f'{given} {lacks}, and only runs are read here; make a run of it by {imported}, and give runs/imported'
        )
    lacks = 'holds no run' if folder.path.exists() else 'is not there'
    if not reads_open_models:
        return Refusal(f'{given} {lacks}; give the folder of a run')
    open_model = join_shell([f'{OPEN}{name}']) if re.fullmatch(r'[\w-]+/[\w.-]+', name) else f'{OPEN}PATH_OR_ID'
    return Refusal(f'{given} {lacks}; give the folder of a run, or {open_model} for an open model')


def is_open_model(folder: Folder) -> bool:
    """Return whether a folder has the config.json of a model of transformers."""
    try:
        return 'model_type' in validation.read_json(folder.path / 'config.json')
    except (OSError, Refusal):
        return False
