"""One process as the hub knows it, and who keeps the others waiting."""

import dataclasses
import math
import time

from sinklab.processes.connection import Connection
from sinklab.processes.ending import ExitStatus
from sinklab.processes.patience import Timeouts
from sinklab.processes.wire import ProgressReport

UNTIMED_ACTIVITIES = ('starting', 'compiling', 'measuring', 'saving', 'restoring', 'ending')
UNBOUNDED_ACTIVITIES = ('preparing its data',)  # of any size
ACTIVITY_FORMATS = {'step': 'in step {step}', 'reading its batch': 'reading its batch of step {step}'}


@dataclasses.dataclass
class Progress:
    """Where a process is: what it does, at which step, since when, and how long that usually takes."""

    activity: str = 'starting'
    step: int = 0
    usual_seconds: float | None = None
    start_time: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_time

    @property
    def rank(self) -> tuple[int, bool]:
        """Further on is greater; who computes a step has arrived at it."""
        return self.step, self.activity == 'step'

    def get_timeout(self, timeouts: Timeouts) -> float:
        """Seconds that it may take."""
        if self.activity in UNBOUNDED_ACTIVITIES:
            return math.inf
        has_usual_time = self.usual_seconds is not None and self.activity not in UNTIMED_ACTIVITIES
        return timeouts.get_step_timeout(self.usual_seconds) if has_usual_time else timeouts.untimed

    def __str__(self) -> str:
        text = ACTIVITY_FORMATS.get(self.activity, f'{self.activity} at step {{step}}' if self.step else self.activity)
        return text.format(step=self.step)


@dataclasses.dataclass
class WorkerState:
    index: int
    host: str
    pid: int
    conn: Connection
    worker_pid: int | None = None
    progress: Progress = dataclasses.field(default_factory=Progress)
    excused_time: float = 0.0  # when it last waited for who was at something that takes its time

    def __str__(self) -> str:
        return f'process {self.index} (host {self.host}, pid {self.worker_pid or self.pid})'

    def update_progress(self, report: ProgressReport) -> None:
        self.worker_pid, self.progress = report.child, Progress(report.place, report.step, report.usual, time.monotonic() - report.seconds)

    def is_late(self, timeouts: Timeouts) -> bool:
        return time.monotonic() - max(self.progress.start_time, self.excused_time) > self.progress.get_timeout(timeouts)

    def reset(self) -> None:
        self.worker_pid, self.progress = None, Progress()


def find_hung_worker(unfinished: list[WorkerState], timeouts: Timeouts) -> ExitStatus | None:
    """Whether some wait too long, and for whom. Who is at something that takes its time is waited for."""
    furthest = max((worker.progress for worker in unfinished), key=lambda progress: progress.rank, default=Progress())
    stragglers = [worker for worker in unfinished if worker.progress.rank < furthest.rank]
    if stragglers and all(worker.progress.activity in UNTIMED_ACTIVITIES and not worker.is_late(timeouts) for worker in stragglers):
        for worker in unfinished:
            worker.excused_time = worker.excused_time if worker in stragglers else time.monotonic()
    if not any(worker.is_late(timeouts) for worker in unfinished):
        return None
    usual_text = '' if furthest.usual_seconds is None else f', usual {furthest.usual_seconds:.2g} s'
    details = [f'{worker} did not arrive ({worker.progress} for {worker.progress.seconds:.0f} s)' for worker in stragglers]
    reason = '; '.join(details) or ('all are there' if len(unfinished) > 1 else 'it has hung')
    return ExitStatus('hung', f'{furthest} for {furthest.seconds:.0f} s{usual_text}: {reason}')
