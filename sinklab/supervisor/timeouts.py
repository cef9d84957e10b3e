"""Timeouts of the processes of a run."""

import dataclasses

from sinklab.storage.lease import OWNER_TIMEOUT_SECONDS


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds; `step_multiple` is a factor of the usual duration of a step."""

    join: float = 300.0  # until all processes have connected
    step_multiple: float = 20.0
    min_step: float = 60.0  # the minimum timeout of a step
    untimed: float = 1800.0  # of an activity without a usual duration: starting, compiling, measuring, saving
    heartbeat: float = 1.0  # between two heartbeats
    silence: float = 10.0  # without a heartbeat until a process counts as lost
    busy_silence: float = OWNER_TIMEOUT_SECONDS  # the same, for a process that the system shows as running
    settle: float = 2.0  # after the first failure, for others that may be its cause
    orderly_exit: float = 60.0  # after the first end that all processes agreed on: others may still be saving
    shutdown: float = 5.0  # for a process to exit after it was told to

    def get_step_timeout(self, usual_seconds: float) -> float:
        return max(self.min_step, self.step_multiple * usual_seconds)
