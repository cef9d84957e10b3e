"""What a group of processes leaves in the folder of a run when it ends: outcome.json, and logs of what went wrong."""

import contextlib
import time
from collections.abc import Callable

from sinklab.files.place import hasty
from sinklab.files.regular import Damaged
from sinklab.files.whole import append, writable
from sinklab.folder import Folder
from sinklab.lease import is_left
from sinklab.processes.ending import End
from sinklab.record import Refusal

SECONDS = 10.0  # of a request to a bucket, for which nobody should be kept waiting
FRUITLESS = 5  # attempts in a row that came to no new checkpoint, each started by a scheduler
FRUITLESS_HERE = 3  # or by the supervisors themselves


class Account:
    """Of process 0. `ours` says whether the folder holds this run: into no other is anything written.

    `checkpoint` says which step of the folder is the newest that was saved to the end.
    """

    def __init__(self, folder: Folder, ours: Callable[[], bool], checkpoint: Callable[[], int | None], restarts: int):
        self.folder, self.ours, self.checkpoint, self.restarts = folder, ours, checkpoint, restarts
        self.total = self.here = 0
        self.newest = None
        self.newest = self.look()
        with contextlib.suppress(OSError, ValueError):
            before = folder.read('outcome')
            if before.get('checkpoint') == self.newest:
                self.total = before.get('fruitless', 0)

    def look(self) -> int | None:
        """Return the newest checkpoint; the one known before where the disk does not say, or a file is damaged."""
        with contextlib.suppress(OSError, ValueError), hasty(SECONDS):
            return self.checkpoint()
        return self.newest

    def judge(self, end: End, able: bool) -> tuple[End, bool]:
        """Whether all begin again after an end; in vain they do so a few times only."""
        if end.kind != 'lost':
            return end, False
        newest = self.look()
        if newest != self.newest:
            self.newest, self.total, self.here = newest, 0, 0
        self.total, self.here = self.total + 1, self.here + 1
        if self.total >= FRUITLESS or self.here >= FRUITLESS_HERE:
            return End(
                'fruitless',
                f'{end.words}; that was attempt {max(self.total, self.here)} in a row without a new checkpoint',
            ), False
        again = able and self.restarts > 0
        self.restarts -= again
        return end, again

    def close(self, end: End) -> None:
        """Writes the outcome where process 0 could not, or does not know what the others know."""
        counted = dict(fruitless=self.total) if end.kind == 'lost' or end.cause == 'fruitless' else {}
        with contextlib.suppress(OSError, ValueError), hasty(SECONDS):
            written = self.read_outcome()
            known = (written.get('kind'), written.get('exit_code')) == (end.kind, end.code) and not counted
            if not known and end.kind != 'refused' and is_left(self.folder.path) and self.ours():
                what = dict(kind=end.kind, step=self.last_step(), checkpoint=self.look(), message=end.words)
                self.folder.write('outcome', what | dict(exit_code=end.code) | counted)

    def read_outcome(self) -> dict:
        """Return what outcome.json says; nothing if it is missing or damaged, and is to be written anew."""
        try:
            return self.folder.read('outcome')
        except (FileNotFoundError, Damaged):
            return {}

    def last_step(self) -> int:
        """Return the step of the last line of metrics.jsonl; 0 if that has none, or cannot be read."""
        try:
            return next((line['step'] for line in reversed(self.folder.lines())), 0)
        except Damaged:
            return 0


def log(folder: Folder, index: int, end: End, noise: str) -> None:
    """Appends to the log of a process what went wrong, and what its threads and libraries said before."""
    with contextlib.suppress(OSError, Refusal), hasty(SECONDS):
        if not folder.is_claimed():
            return
        with writable(folder.path / 'processes'):
            append(
                folder.path / 'processes' / f'{index}.log',
                f'{time.strftime("%Y-%m-%dT%H:%M:%S%z")} {end.words}\n{noise}\n',
            )
