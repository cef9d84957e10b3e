"""What time a run has taken, and takes."""

import time


class Stopwatch:
    """Seconds of a run over all its attempts, and the pace of its steps."""

    usual = None  # seconds a step has lately taken

    def __init__(self, earlier: float):
        self.start = time.perf_counter() - earlier
        self.restart()

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def restart(self) -> None:
        self.lap, self.steps = time.perf_counter(), 0

    def step(self) -> None:
        """One more has ended; what is done between them does not count."""
        self.steps += 1
        self.usual = 1 / self.pace()

    def pace(self) -> float:
        """Steps a second since the last restart."""
        return self.steps / (time.perf_counter() - self.lap)
