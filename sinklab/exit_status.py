"""How a run or a process has ended, the exit codes that schedulers act on, and the signals that stop it."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from typing import Literal

# {kind in outcome.json: exit code}. Every other code, such as that of a process that a signal or jax has ended, means
# what `lost` means: start the same command again.
EXIT_CODES = {'done': 0, 'refused': 1, 'crashed': 1, 'diverged': 3, 'lost': 75, 'stopped': 128 + signal.SIGTERM}
FINAL_EXIT_CODES = 0, 1, 3, 128 + signal.SIGINT  # after which a scheduler does not start a run again
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """Why a run or a process has ended, described in one line."""

    kind: Literal[tuple(EXIT_CODES)]
    message: str = ''
    trace: str = ''  # the traceback of an unexpected error
    signal_number: int = 0  # the signal that stopped it

    @property
    def exit_code(self) -> int:
        return 128 + signal.SIGINT if self.signal_number == signal.SIGINT else EXIT_CODES[self.kind]


@contextlib.contextmanager
def handle_stop_signals(handler: Callable) -> Iterator[None]:
    """Call a function for each SIGINT, SIGTERM and SIGHUP; SIGHUP stays ignored if it is, as under nohup."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not is_nohup]
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)
