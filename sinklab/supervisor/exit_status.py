"""Exit statuses of a process and of a group of processes, and their exit codes."""

import dataclasses
import signal
import traceback
from typing import Literal

# Cause of the end of a process or a run -> (kind in outcome.json, exit code). If processes end with several causes,
# the first in this order has caused the others: a killed process makes others raise and abort, but not the reverse.
EXIT_CAUSES = {
    'refused': ('refused', 1),  # a UserError
    'diverged': ('diverged', 3),  # a metric is not finite
    'disagreed': ('lost', 42),  # replicas or processes hold different values
    'killed': ('lost', 42),  # by a signal
    'lost': ('lost', 42),  # another process or its host does not respond
    'frozen': ('lost', 42),  # suspended, or no Python code ran for some time
    'hung': ('lost', 42),  # a step or another activity took too long
    'crashed': ('crashed', 70),  # an unexpected exception
    'fruitless': ('crashed', 70),  # several attempts in a row without a new checkpoint
    'interrupted': ('stopped', 130),
    'stopped': ('stopped', 42),
    'storage': ('lost', 42),  # an OSError of a disk or a bucket
    'runtime': ('lost', 42),  # a JaxRuntimeError
    'aborted': ('lost', 42),  # by SIGABRT
    'done': ('done', 0),
}
# The kind of an exit code, for a process that reported none. 42 means `lost`, since a process that stops reports it.
KIND_BY_EXIT_CODE = {code: kind for kind, code in reversed(EXIT_CAUSES.values())}
CAUSE_BY_SIGNAL = {signal.SIGINT: 'interrupted', signal.SIGHUP: 'stopped', signal.SIGTERM: 'stopped'}
SAME_SIGNAL_SECONDS = 1.0  # seconds within which a terminal, a scheduler and a sweep send the same signal
ExitCause = Literal[tuple(EXIT_CAUSES)]
STOPPING_MESSAGE = 'stopping after this step; send the signal again to stop at once'


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """Why a process or a run has ended, described in one line."""

    cause: ExitCause
    message: str = ''
    trace: str = ''  # details for debugging: a traceback or the end of a log
    orderly: bool = False  # the other processes are about to end in the same way

    def __post_init__(self):
        for name in ('message', 'trace'):
            object.__setattr__(self, name, escape_unprintable(getattr(self, name)))

    @property
    def kind(self) -> str:
        return EXIT_CAUSES[self.cause][0]

    @property
    def exit_code(self) -> int:
        return EXIT_CAUSES[self.cause][1]

    @property
    def is_failure(self) -> bool:
        """Return whether the end needs an investigation: `lost` or `crashed`."""
        return self.kind in ('lost', 'crashed')

    def replace_message(self, message: str) -> 'ExitStatus':
        return dataclasses.replace(self, message=message)


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters, such as lone surrogates; keep line breaks and tabs."""
    return ''.join(char if char.isprintable() or char in '\n\t' else ascii(char)[1:-1] for char in text)


def make_exit_status(return_code: int, log_tail: str) -> ExitStatus:
    """Return the exit status of a process that reported none.

    Args:
        return_code: The exit code, or minus the number of the signal that killed the process.
        log_tail: The end of its log, which becomes the trace of a crash.
    """
    if -return_code in CAUSE_BY_SIGNAL:
        return make_immediate_stop(-return_code)
    if return_code == -signal.SIGABRT:
        return ExitStatus('aborted', 'aborted (SIGABRT)')
    if return_code < 0:
        return ExitStatus('killed', f'killed by {signal.Signals(-return_code).name}')
    return ExitStatus('crashed', f'exit code {return_code}, without a message', log_tail)


def make_crash(error: BaseException, cause: str = 'crashed') -> ExitStatus:
    """Make the exit status of an unexpected exception, with its traceback."""
    message = ' '.join(traceback.format_exception_only(error)[-1].split())
    return ExitStatus(cause, message, ''.join(traceback.format_exception(error)))


def make_early_stop(signum: int) -> ExitStatus:
    return ExitStatus(
        CAUSE_BY_SIGNAL[signum], f'{signal.Signals(signum).name} arrived before the first step; nothing was started'
    )


def make_immediate_stop(signum: int) -> ExitStatus:
    return ExitStatus(CAUSE_BY_SIGNAL[signum], 'stopped at once; what was saved before is intact')


def combine_exit_statuses(exit_statuses: dict[int, ExitStatus], names: list[str]) -> ExitStatus:
    """Combine the exit statuses of processes into the exit status of the run.

    Args:
        exit_statuses: Exit statuses by process index, in the order in which they arrived.
        names: The names of all processes, by index.

    Returns:
        The exit status whose cause is first in EXIT_CAUSES. Its words begin with the name of the process, unless all
        processes ended with the same words.
    """
    root_index = min(exit_statuses, key=lambda index: [*EXIT_CAUSES].index(exit_statuses[index].cause))
    root_status = exit_statuses[root_index]
    is_same_for_all = (
        len(exit_statuses) == len(names) and len({status.message for status in exit_statuses.values()}) == 1
    )
    return (
        root_status if is_same_for_all else root_status.replace_message(f'{names[root_index]}: {root_status.message}')
    )
