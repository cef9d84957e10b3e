"""RUN[@STEP], as a person names a run or one of its checkpoints."""

from sinklab.files.regular import Damaged
from sinklab.folder import Folder
from sinklab.parse import parse
from sinklab.record import Refusal
from sinklab.spec import Spec


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
        lacks = 'holds no run' if folder.path.exists() else 'is not there'
        raise Refusal(f'{folder} {lacks}; give the folder of a run') from error
    except Damaged:
        raise
    except Refusal as refusal:
        commit = folder.environment().get('commit')
        raise Refusal(
            f'{folder} holds a run of another version ({refusal}); go on from it with commit {commit}'
        ) from refusal
