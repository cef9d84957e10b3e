"""How long the processes of a run wait for each other."""

import dataclasses

from sinklab.lease import PATIENCE


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds, and how many times its usual duration a step may take."""

    join: float = 300.0  # until all have come
    multiple: float = 20.0
    floor: float = 60.0  # no step is late before
    apart: float = 1800.0  # in what has no usual duration: starting, compiling, measuring, saving
    beat: float = 1.0  # from one sign of life to the next
    silence: float = 10.0  # without one, a process is lost
    busy: float = PATIENCE  # or, where the system says that it is running
    settle: float = 2.0  # after the first bad end, for others that may be its cause
    orderly: float = 60.0  # after the first end that all have agreed on: they may still be saving
    parting: float = 5.0  # for what has been told its end to go

    def of_step(self, usual: float) -> float:
        return max(self.floor, self.multiple * usual)
