"""RUN[@STEP], as a person names a run or one of its checkpoints."""

from sinklab.folder import Folder
from sinklab.record import Refusal


def named(given: str) -> tuple[Folder, int | None]:
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
