"""Timeouts of the processes of a run."""

import dataclasses

from sinklab.storage.lease import OWNER_TIMEOUT_SECONDS


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds, and how many times its usual duration a step may take."""

    join: float = 300.0  # until all have come
    step_multiple: float = 20.0
    min_step: float = 60.0  # no step is late before
    untimed: float = 1800.0  # in what has no usual duration: starting, compiling, measuring, saving
    heartbeat: float = 1.0  # from one sign of life to the next
    silence: float = 10.0  # without one, a process is lost
    busy_silence: float = OWNER_TIMEOUT_SECONDS  # or, where the system says that it is running
    settle: float = 2.0  # after the first bad end, for others that may be its cause
    orderly_exit: float = 60.0  # after the first end that all have agreed on: they may still be saving
    shutdown: float = 5.0  # for what has been told its end to go

    def get_step_timeout(self, usual_seconds: float) -> float:
        return max(self.min_step, self.step_multiple * usual_seconds)
