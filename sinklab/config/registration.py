"""Names that users register beside those of sinklab: of metrics and of FFN activations."""

import inspect
from collections.abc import Collection, Iterable
from pathlib import Path

from sinklab.errors import UserError

PLACES: dict[str, str] = {}  # {'metric NAME': 'FILE:LINE' that registered it}


def record_names(kind: str, names: Iterable[str], sinklab_names: Collection[str]) -> None:
    """Record which line called the function that calls this one, to register names of a kind.

    The same line may register them again, and so may code without a file, such as a cell of a notebook.

    Raises:
        UserError: sinklab or another line has defined a name.
    """
    caller = inspect.stack(context=0)[2]
    path = Path(caller.filename).absolute()
    places = {f'{kind} {name}': f'{path}:{caller.lineno}' for name in names}
    for entry, place in places.items():
        owner = PLACES.get(entry, 'sinklab' if entry.removeprefix(f'{kind} ') in sinklab_names else place)
        if owner != place and (owner == 'sinklab' or Path(owner.rpartition(':')[0]).is_file()):
            raise UserError(f'the {entry} is defined by {owner} already; choose another name')
    PLACES.update(places)
