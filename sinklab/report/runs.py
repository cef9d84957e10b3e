"""A run as a report wants it: read once, in plain arrays, the same for the page and for the pictures."""

import dataclasses

import numpy as np

from sinklab.escape import quote_shell
from sinklab.files import run_files
from sinklab.files.place import joined, resolved
from sinklab.files.regular import Damaged
from sinklab.folder import METRICS, Folder, ancestry, flat, named
from sinklab.measure import table as measures
from sinklab.measure.measure import Number, Picture
from sinklab.parse import parse
from sinklab.record import Refusal
from sinklab.report import labels, probes


@dataclasses.dataclass(frozen=True)
class Run:
    name: str  # its arm, and its seed where the arm has others
    arm: str
    records: list[dict]
    probe_steps: list[int]  # of the probes that are drawn
    values: dict[
        str, np.ndarray
    ]  # of those N probes, by names of pictures: values_NLH for heads, values_NL for ratios
    folder: Folder
    notes: list[str]  # what it comes from, and what has changed on its way
    about: dict  # row.json
    config: dict  # flat
    ending: dict  # outcome.json; of kind `unfinished` where it has said nothing yet

    @property
    def seed(self) -> int | None:
        return self.config.get('seed')

    @property
    def kind(self) -> str:
        return self.ending['kind']

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
        if not self.probe_steps:
            return []
        alpha_LH = self.values[measures.HEADLINE_MAP.name][-1]
        order = np.argsort(-alpha_LH, axis=None)[:count]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, alpha_LH.shape), strict=True)]

    def has(self, picture: Picture) -> bool:
        if picture.kind != 'matrices':
            return picture.name in self.values
        return bool(self.probe_steps) and self.matrices(picture) is not None

    def matrices(self, picture: Picture, at: int = -1) -> np.ndarray | None:
        """Of all layers and heads in one of its probes, read when they are asked for."""
        found = probes.arrays(self.folder.probe(self.probe_steps[at]), [picture.array])
        return picture.of(found[picture.array]) if found else None


def read(paths: list[str]) -> list[Run]:
    """The runs in these folders, each named by its row, and by its changes, its seed or its folder where it must."""
    folders = [Folder(path) for path in dict.fromkeys(paths)]
    folders = readable(folders)
    rows, configs = [row_of(folder) for folder in folders], [config(folder) for folder in folders]
    arms = labels.arms(rows, configs)
    names = labels.names(arms, [one.get('seed') for one in configs], [folder.path for folder in folders])
    count = max(2, probes.FILES // len(folders))
    found = []
    for of_one in zip(folders, names, arms, configs, strict=True):
        try:
            found.append(run(*of_one, count))
        except Damaged as error:  # such as a probe
            if len(folders) == 1:
                raise
            run_files.warn(of_one[0].path, f'{error}; the report goes on without this run')
    if not found:
        raise Refusal('each of these runs has a file that is damaged, as said above; mend one of them')
    return found


def readable(folders: list[Folder]) -> list[Folder]:
    """Return the folders whose row and config can be read; of several, the others are named and left out."""
    found, damaged = [], []
    for folder in folders:
        try:
            row_of(folder)
            config(folder)
            found.append(folder)
        except Damaged as error:
            damaged.append((folder, error))
    if not found and damaged:
        raise damaged[0][1]
    for folder, error in damaged:
        run_files.warn(folder.path, f'{error}; the report goes on without this run')
    return found


def branches(runs: list[Run], number: str) -> list[tuple[int, list[int], list[float]]]:
    """(place of a fork, steps, values): from its parent's curve to its own, where both are among the runs.

    One that counts its steps anew stands beside its parent and is no branch of it.
    """
    found, at = [], {resolved(run.folder.path): run for run in runs}
    for place, run in enumerate(runs):
        lineage = run.about.get('from') or {}
        start = lineage.get('start', lineage.get('step'))
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


def row_of(folder: Folder) -> str:
    """The name of its row, or its folder's where it has none; of a fork, with what it comes from."""
    try:
        row, lineage = folder.read('row')['row'], folder.lineage()
        row = folder.path.absolute().name if row in (None, '') else str(row)
        if not lineage:
            return row
        origin = lineage.get('row') or lineage['run']
        return f'{row} from {named(lineage.get("takes", ""), origin, lineage["step"])}'
    except (FileNotFoundError, NotADirectoryError, KeyError) as error:
        runs = (
            f'the runs of this sweep: {quote_shell(str(folder))}/*/'
            if (folder.path / 'sweep.json').exists()
            else 'folders of runs'
        )
        raise Refusal(f'{folder} holds no run that `sinklab train` has written; give {runs}') from error


def config(folder: Folder) -> dict:
    """Flat; empty of a run that was stopped before it had one."""
    try:
        found = folder.read('config')
    except FileNotFoundError:
        if (folder.path / METRICS).exists():
            file = folder.path / 'config.json'
            run_files.warn(file, f'{file} is missing; the report does without it, and without a seed')
        return {}
    try:
        parse(found)
    except Refusal as error:
        file = folder.path / 'config.json'
        run_files.warn(file, f'{file} is damaged, or of another version, and is shown as it is ({error})')
    return flat(found)


def run(folder: Folder, name: str, arm: str, config: dict, count: int) -> Run:
    last = config.get('optimizer.steps')
    drawn, records = probes.kept(folder.probes, count), folder.records(last)
    steps = [run_files.step_of(path) for path in drawn]
    end = ending(folder, records, last)
    warn_of_lost_probes(folder, records)
    if end['kind'] == 'done' and last is not None:
        folder.warn_of_lost_lines(records[-1] if records else {}, last, 'train/loss', 'valid/loss')
    warn_of_gaps(folder, records, config.get('log.every_steps'))
    return Run(name, arm, records, steps, probes.values(drawn), folder, notes(folder), about_of(folder), config, end)


def warn_of_gaps(folder: Folder, records: list[dict], every: int | None) -> None:
    """Say on stderr where lines are missing within metrics.jsonl."""
    if not isinstance(every, int):
        return  # of an older run, or damaged
    try:
        gaps = folder.gaps(records, every, records[-1]['step'] if records else None)
    except Damaged as error:
        run_files.warn(folder.path / 'row.json', str(error))
        return
    for gap in gaps:
        run_files.warn(folder.path / METRICS, folder.describe_gap(gap))


def warn_of_lost_probes(folder: Folder, records: list[dict]) -> None:
    """Say on stderr which probes are in metrics.jsonl and have no file."""
    there = {run_files.step_of(path) for path in folder.probes}
    lost = [record['step'] for record in records if measures.HEADLINE.name in record and record['step'] not in there]
    if lost and there:
        file = folder.probe(lost[0])
        more = f' (and {len(lost) - 1} more)' if lost[1:] else ''
        run_files.warn(file, f'{file} is missing{more}; maps are drawn without it')


def about_of(folder: Folder) -> dict:
    """Read row.json; published values that are no numbers are named and left out."""
    about, file = folder.read('row'), folder.path / 'row.json'
    given = about.get('published', {})
    numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
    if others := [name for name in given if name not in numbers]:
        run_files.warn(
            file, f'{file} has {given[others[0]]!r} as published {others[0]}, which is no number; left out'
        )
    return about | dict(published=numbers, source=str(about.get('source') or ''))


def ending(folder: Folder, records: list[dict], steps: int | None) -> dict:
    """How the latest attempt has ended; a run that says nothing is done if it has measured its last step."""
    file = folder.path / 'outcome.json'
    try:
        return dict(step=0, message='') | run_files.read_json(file, 'outcome', 'the report judges by its numbers')
    except (OSError, Damaged) as error:
        if isinstance(error, Damaged):
            run_files.warn(file, str(error))
        last = records[-1] if records else {}
        done = last.get('step') == steps is not None and 'valid/loss' in last
        return dict(kind='done' if done else 'unfinished', step=last.get('step', 0), message='')


def drawn_pictures(runs: list[Run]) -> list[Picture]:
    """Those that some run has the array of; one is older than a measure whose array its probes lack."""
    return [picture for picture in measures.PICTURES if any(run.has(picture) for run in runs)]


NUMBERS = (
    Number('step', 'step', 'Last step that was recorded.', digits=0),
    *(number for number in measures.NUMBERS if number.table),
    measures.VALID_LOSS,
    Number('seconds', 'time', 'Time of training, over all attempts.', 's', digits=0),
)
