"""A run as a report wants it: read once, in plain arrays, the same for the page and for the pictures."""

import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np

from sinklab.folder import Folder
from sinklab.measure import sink
from sinklab.record import Refusal


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    records: list[dict]
    probe_steps: list[int]
    alpha_NLH: np.ndarray  # importance of the first token, mean over sequences, of each of N probes
    attention_LHTS: np.ndarray  # of one sequence, at the last probe; rows sum to 1, columns left of the text
    norm_LT: np.ndarray  # at the last probe

    @property
    def first_key(self) -> int:
        """The number of the leftmost key, the first token being 1: 0 where there is a column."""
        queries, keys = self.attention_LHTS.shape[-2:]
        return 1 - (keys - queries)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) where a number was recorded."""
        found = [(record['step'], record[name]) for record in self.records if name in record]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str) -> float | None:
        """The newest value of a number."""
        return next((record[name] for record in reversed(self.records) if name in record), None)

    def strongest(self, count: int) -> list[tuple[int, int]]:
        """(layer, head) of the heads that give most to the first token, in the last probe."""
        alpha_LH = self.alpha_NLH[-1]
        order = np.argsort(-alpha_LH, axis=None)[:count]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, alpha_LH.shape), strict=True)]


def read(paths: list[str]) -> list[Run]:
    """The runs in these folders, each named by its row, and by its folder too where two rows are the same."""
    folders = [Folder(path) for path in dict.fromkeys(paths)]
    rows = [row_of(folder) for folder in folders]
    return [run(folder, name(folder, row, rows.count(row) == 1)) for folder, row in zip(folders, rows, strict=True)]


def name(folder: Folder, row: str, alone: bool) -> str:
    return row if row and alone else f'{row} ({folder})' if row else str(folder)


def row_of(folder: Folder) -> str:
    try:
        return folder.read('row')['row']
    except (OSError, json.JSONDecodeError, KeyError) as error:
        runs = f'the runs of this sweep: {folder}/*/' if (folder.path / 'sweep.json').exists() else 'folders of runs'
        raise Refusal(f'{folder} holds no run that `sinklab train` has written; give {runs}') from error


def run(folder: Folder, name: str) -> Run:
    probes = [(int(path.stem), opened(path)) for path in folder.probes]
    if not probes:
        raise Refusal(f'{folder} holds no probe yet; wait for step 0, or go on with the training')
    last = probes[-1][1]
    return Run(
        name=name,
        records=folder.records(),
        probe_steps=[step for step, _ in probes],
        alpha_NLH=np.stack([probe['alpha_LPHK'][..., 0].mean(1) for _, probe in probes]),
        attention_LHTS=np.asarray(sink.proxy(last['attention_LHTS'].astype(np.float32))),
        norm_LT=last['norm_LT'],
    )


def opened(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise Refusal(f'{path} is damaged ({error}); delete it, and the report does without it') from error


COLUMNS = (
    ('arm', 'arm', '{}'),
    ('step', 'step', '{}'),
    ('Sink_1', 'sink/1', '{:.1f} %'),
    ('Sink_*', 'sink/star', '{:.1f} %'),
    ('mean alpha_1', 'alpha/1', '{:.3f}'),
    ('uniform', 'alpha/floor', '{:.3f}'),
    ('raw row mass', 'mass/row', '{:.2f}'),
    ('valid loss', 'valid/loss', '{:.3f}'),
    ('seconds', 'seconds', '{:.0f}'),
)


def table(runs: list[Run]) -> list[dict]:
    """The closing table: a row a run, None where a number was never recorded."""
    names = [name for _, name, _ in COLUMNS[1:]]
    return [dict(arm=run.name, **{name: run.last(name) for name in names}) for run in runs]


def formatted(row: dict) -> list[str]:
    """The cells of a row, as a person reads them."""
    return ['-' if row[name] is None else form.format(row[name]) for _, name, form in COLUMNS]
