"""What time a run has taken, and takes."""

import time


class StepTimer:
    """Seconds of a run over all its attempts, and the pace of its steps."""

    step_seconds = None  # seconds a step has lately taken

    def __init__(self, previous_seconds: float):
        self.start_time = time.perf_counter() - previous_seconds
        self.restart()

    def get_total_seconds(self) -> float:
        return time.perf_counter() - self.start_time

    def restart(self) -> None:
        self.lap_start, self.num_steps = time.perf_counter(), 0

    def count_step(self) -> None:
        """One more has ended; what is done between them does not count."""
        self.num_steps += 1
        self.step_seconds = 1 / self.get_steps_per_second()

    def get_steps_per_second(self) -> float:
        """Steps a second since the last restart."""
        return self.num_steps / (time.perf_counter() - self.lap_start)
