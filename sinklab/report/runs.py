"""A run as a report wants it: read once, in plain arrays, the same for the page and for the pictures."""

import dataclasses
import shlex
import zipfile
from pathlib import Path

import numpy as np

from sinklab.files.place import joined, resolved
from sinklab.folder import Folder, ancestry, named
from sinklab.measure import table as measures
from sinklab.measure.measure import Number, Picture
from sinklab.record import Refusal


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    records: list[dict]
    probe_steps: list[int]
    values: dict[str, np.ndarray]  # by names of pictures: values_NLH of N probes for heads, else of the last probe
    folder: Folder
    notes: list[str]  # what it comes from, and what has changed on its way

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) where a number was recorded."""
        found = [(record['step'], record[name]) for record in self.records if name in record]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str) -> float | None:
        """The newest value of a number."""
        return next((record[name] for record in reversed(self.records) if name in record), None)

    def height(self, name: str, step: int) -> float | None:
        """Where the curve of a number is drawn at a step."""
        steps, values = self.curve(name)
        return float(np.interp(step, steps, values)) if steps else None

    def strongest(self, count: int) -> list[tuple[int, int]]:
        """(layer, head) of the heads that give most to the first token, in the last probe."""
        alpha_LH = self.values[measures.HEADLINE_MAP.name][-1]
        order = np.argsort(-alpha_LH, axis=None)[:count]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, alpha_LH.shape), strict=True)]


def read(paths: list[str]) -> list[Run]:
    """The runs in these folders, each named by its row, and by its folder too where two rows are the same."""
    folders = [Folder(path) for path in dict.fromkeys(paths)]
    rows = [row_of(folder) for folder in folders]
    return [run(folder, name(folder, row, rows.count(row) == 1)) for folder, row in zip(folders, rows, strict=True)]


def branches(runs: list[Run], number: str) -> list[tuple[int, list[int], list[float]]]:
    """(place of a fork, steps, values): from its parent's curve to its own, where both are among the runs.

    One that counts its steps anew stands beside its parent and is no branch of it.
    """
    found, at = [], {resolved(run.folder.path): run for run in runs}
    for place, run in enumerate(runs):
        lineage, start = run.folder.lineage(), run.folder.start()
        goes_on = lineage and lineage['step'] == start
        parent = at.get(joined(run.folder.path, lineage['run'])) if goes_on else None
        if parent and (before := parent.height(number, start)) is not None:
            steps, values = run.curve(number)
            found.append((place, [start, *steps[:1]], [before, *values[:1]]))
    return found


def notes(folder: Folder) -> list[str]:
    attempts = folder.environment().get('attempts', [])
    changed = [f'since step {one["step"]}: {"; ".join(one["changes"])}' for one in attempts if 'changes' in one]
    return [*filter(None, ['; '.join(ancestry(folder.lineage()))]), *changed]


def name(folder: Folder, row: str, alone: bool) -> str:
    return row if row and alone else f'{row} ({folder})' if row else str(folder)


def row_of(folder: Folder) -> str:
    """The name of its row; of a fork, with what it comes from."""
    try:
        row, lineage = folder.read('row')['row'], folder.lineage()
        if not lineage:
            return row
        origin = named(lineage.get('takes', ''), lineage['row'], lineage['step'])
        return f'{row or folder.path.name} from {origin}'
    except (FileNotFoundError, NotADirectoryError, KeyError) as error:
        runs = (
            f'the runs of this sweep: {shlex.quote(str(folder))}/*/'
            if (folder.path / 'sweep.json').exists()
            else 'folders of runs'
        )
        raise Refusal(f'{folder} holds no run that `sinklab train` has written; give {runs}') from error


def run(folder: Folder, name: str) -> Run:
    if not (probes := folder.probes):
        raise Refusal(f'{folder} holds no probe yet; wait for step 0, or go on with the training')
    values = {}
    for picture in measures.PICTURES:
        paths = probes if picture.kind == 'heads' else probes[-1:]
        found = [array(path, picture.array, picture is measures.HEADLINE_MAP) for path in paths]
        if all(one is not None for one in found):
            drawn = [picture.of(one) for one in found]
            values[picture.name] = np.stack(drawn) if picture.kind == 'heads' else drawn[0]
    return Run(name, folder.records(), [int(path.stem) for path in probes], values, folder, notes(folder))


def common_pictures(runs: list[Run]) -> list[Picture]:
    """Those that can be drawn of all runs; one is older than a measure whose array its probes lack."""
    return [picture for picture in measures.PICTURES if all(picture.name in run.values for run in runs)]


def array(path: Path, name: str, needed: bool) -> np.ndarray | None:
    """One array of a probe's file; None where it is lacking and not needed."""
    try:
        with path.open('rb') as file, np.load(file) as arrays:
            found = arrays.get(name)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise Refusal(f'{path} is damaged ({error}); delete it, and the report does without it') from error
    if found is None and needed:
        raise Refusal(
            f'{path} has no {name}, for an earlier sinklab has written it; delete it, and the report does without '
            'it, or train the run anew'
        )
    return found


NUMBERS = (
    Number('step', 'step', 'The newest that is recorded.', digits=0),
    *(number for number in measures.NUMBERS if number.table),
    Number('valid/loss', 'valid loss', 'The mean cross-entropy of held-out windows.'),
    Number('seconds', 'seconds', 'Of all attempts.', digits=0),
)


def table(runs: list[Run]) -> list[dict]:
    """The closing table: a row a run, None where a number was never recorded."""
    return [
        dict(arm=run.name, notes=run.notes, **{number.name: run.last(number.name) for number in NUMBERS})
        for run in runs
    ]


def cells(row: dict) -> list[str]:
    """A row of it as a person reads it."""
    values = [(number, row[number.name]) for number in NUMBERS]
    return [row['arm'], *('-' if value is None else number.text(value) for number, value in values)]
