"""What a group of processes leaves in the folder of a run when it ends: outcome.json, and logs of what went wrong."""

import contextlib
import time
from collections.abc import Callable

from sinklab.files.place import short_timeout
from sinklab.files.regular import DamagedFileError
from sinklab.files.whole import append_text, writable_folder
from sinklab.folder import RunDir
from sinklab.lease import is_unowned
from sinklab.processes.ending import ExitStatus
from sinklab.record import UserError

STORAGE_TIMEOUT_SECONDS = 10.0  # of a request to a bucket, for which nobody should be kept waiting
MAX_FRUITLESS = 5  # attempts in a row that came to no new checkpoint, each started by a scheduler
MAX_FRUITLESS_RESTARTS = 3  # or by the supervisors themselves


class RestartPolicy:
    """Of process 0. `ours` says whether the folder holds this run: into no other is anything written.

    `checkpoint` says which step of the folder is the newest that was saved to the end.
    """

    def __init__(self, run_dir: RunDir, is_this_run: Callable[[], bool], find_newest_step: Callable[[], int | None], restarts: int):
        self.run_dir, self.is_this_run, self.find_newest_step, self.restarts = run_dir, is_this_run, find_newest_step, restarts
        self.num_fruitless = self.num_fruitless_here = 0
        self.newest_step = None
        self.newest_step = self.poll_newest_step()
        with contextlib.suppress(OSError, ValueError):
            last_outcome = run_dir.read_json('outcome')
            if last_outcome.get('checkpoint') == self.newest_step:
                self.num_fruitless = last_outcome.get('fruitless', 0)

    def poll_newest_step(self) -> int | None:
        """Return the newest checkpoint; the one known before where the disk does not say, or a file is damaged."""
        with contextlib.suppress(OSError, ValueError), short_timeout(STORAGE_TIMEOUT_SECONDS):
            return self.find_newest_step()
        return self.newest_step

    def decide_restart(self, exit_status: ExitStatus, can_restart: bool) -> tuple[ExitStatus, bool]:
        """Whether all begin again after an end; in vain they do so a few times only."""
        if exit_status.kind != 'lost':
            return exit_status, False
        newest_step = self.poll_newest_step()
        if newest_step != self.newest_step:
            self.newest_step, self.num_fruitless, self.num_fruitless_here = newest_step, 0, 0
        self.num_fruitless, self.num_fruitless_here = self.num_fruitless + 1, self.num_fruitless_here + 1
        if self.num_fruitless >= MAX_FRUITLESS or self.num_fruitless_here >= MAX_FRUITLESS_RESTARTS:
            return ExitStatus(
                'fruitless',
                f'{exit_status.words}; that was attempt {max(self.num_fruitless, self.num_fruitless_here)} in a row without a new checkpoint',
            ), False
        is_restarting = can_restart and self.restarts > 0
        self.restarts -= is_restarting
        return exit_status, is_restarting

    def write_outcome(self, exit_status: ExitStatus) -> None:
        """Writes the outcome where process 0 could not, or does not know what the others know."""
        fruitless_field = dict(fruitless=self.num_fruitless) if exit_status.kind == 'lost' or exit_status.cause == 'fruitless' else {}
        with contextlib.suppress(OSError, ValueError), short_timeout(STORAGE_TIMEOUT_SECONDS):
            last_outcome = self.read_outcome()
            is_recorded = (last_outcome.get('kind'), last_outcome.get('exit_code')) == (exit_status.kind, exit_status.exit_code) and not fruitless_field
            if not is_recorded and exit_status.kind != 'refused' and is_unowned(self.run_dir.path) and self.is_this_run():
                outcome = dict(kind=exit_status.kind, step=self.read_last_step(), checkpoint=self.poll_newest_step(), message=exit_status.words)
                self.run_dir.write_json('outcome', outcome | dict(exit_code=exit_status.exit_code) | fruitless_field)

    def read_outcome(self) -> dict:
        """Return what outcome.json says; nothing if it is missing or damaged, and is to be written anew."""
        try:
            return self.run_dir.read_json('outcome')
        except (FileNotFoundError, DamagedFileError):
            return {}

    def read_last_step(self) -> int:
        """Return the step of the last line of metrics.jsonl; 0 if that has none, or cannot be read."""
        try:
            return next((line['step'] for line in reversed(self.run_dir.read_metric_lines())), 0)
        except DamagedFileError:
            return 0


def log_failure(run_dir: RunDir, index: int, exit_status: ExitStatus, log_tail: str) -> None:
    """Appends to the log of a process what went wrong, and what its threads and libraries said before."""
    with contextlib.suppress(OSError, UserError), short_timeout(STORAGE_TIMEOUT_SECONDS):
        if not run_dir.has_run():
            return
        with writable_folder(run_dir.path / 'processes'):
            append_text(
                run_dir.path / 'processes' / f'{index}.log',
                f'{time.strftime("%Y-%m-%dT%H:%M:%S%z")} {exit_status.words}\n{log_tail}\n',
            )
