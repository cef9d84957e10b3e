"""Exit statuses of a process and of a group of processes, and their exit codes."""

import dataclasses
import signal
import traceback
from typing import Literal

from sinklab.schema import UserError

# What a process, or all of them, have ended of -> (kind in outcome.json, exit code). Of several, the first in this
# order has caused the others: a process that is killed makes others raise and abort, and none of those kills it.
EXIT_CAUSES = {
    'refused': ('refused', 1),
    'diverged': ('diverged', 3),
    'disagreed': ('lost', 42),
    'killed': ('lost', 42),
    'lost': ('lost', 42),
    'frozen': ('lost', 42),
    'hung': ('lost', 42),
    'crashed': ('crashed', 70),
    'fruitless': ('crashed', 70),
    'interrupted': ('stopped', 130),
    'stopped': ('stopped', 42),
    'storage': ('lost', 42),
    'runtime': ('lost', 42),
    'aborted': ('lost', 42),
    'done': ('done', 0),
}
# What an exit code says where no word has come: a stop would have left one.
KIND_BY_EXIT_CODE = {code: kind for kind, code in reversed(EXIT_CAUSES.values())}
CAUSE_BY_SIGNAL = {signal.SIGINT: 'interrupted', signal.SIGHUP: 'stopped', signal.SIGTERM: 'stopped'}
SAME_SIGNAL_SECONDS = 1.0  # seconds within which a terminal, a scheduler and a sweep send the same signal
ExitCause = Literal[tuple(EXIT_CAUSES)]
STOPPING_MESSAGE = 'stopping after this step; once more to stop at once'


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """Why a process or a run has ended, described in one line."""

    cause: ExitCause
    words: str = ''
    trace: str = ''  # for who has to mend it
    orderly: bool = False  # the others are about to end alike

    def __post_init__(self):
        for name in ('words', 'trace'):
            object.__setattr__(self, name, escape_unprintable(getattr(self, name)))

    @property
    def kind(self) -> str:
        return EXIT_CAUSES[self.cause][0]

    @property
    def exit_code(self) -> int:
        return EXIT_CAUSES[self.cause][1]

    @property
    def is_failure(self) -> bool:
        """Whether something is to be looked into."""
        return self.kind in ('lost', 'crashed')

    def replace_words(self, words: str) -> 'ExitStatus':
        return dataclasses.replace(self, words=words)


def escape_unprintable(text: str) -> str:
    """Escape control characters and what has no UTF-8; line breaks and tabs stay."""
    return ''.join(char if char.isprintable() or char in '\n\t' else ascii(char)[1:-1] for char in text)


def make_exit_status(return_code: int, has_started: bool, log_tail: str) -> ExitStatus:
    """Return the exit status of a process that reported none; `return_code` is minus a signal that killed it."""
    if -return_code in CAUSE_BY_SIGNAL:
        return make_immediate_stop(-return_code) if has_started else make_early_stop(-return_code)
    if return_code == -signal.SIGABRT:
        return ExitStatus('aborted', 'aborted by the runtime of jax')
    if return_code < 0:
        return ExitStatus('killed', f'killed by {signal.Signals(-return_code).name}')
    return ExitStatus('crashed', f'exit code {return_code}, without a word', log_tail)


def describe_error(error: Exception) -> ExitStatus:
    """Return the end of a run in which what watches over its processes has failed."""
    if isinstance(error, UserError):
        return ExitStatus('refused', str(error))
    message = ' '.join(traceback.format_exception_only(error)[-1].split())
    return ExitStatus('crashed', message, ''.join(traceback.format_exception(error)))


def make_early_stop(signum: int) -> ExitStatus:
    return ExitStatus(
        CAUSE_BY_SIGNAL[signum], f'{signal.Signals(signum).name} came before the first step; nothing was begun'
    )


def make_immediate_stop(signum: int) -> ExitStatus:
    return ExitStatus(CAUSE_BY_SIGNAL[signum], 'stopped at once; what was saved before is intact')


def combine_exit_statuses(exit_statuses: dict[int, ExitStatus], names: list[str]) -> ExitStatus:
    """Combine the exit statuses of processes, in the order in which they arrived, into that of the run."""
    root_index = min(exit_statuses, key=lambda index: [*EXIT_CAUSES].index(exit_statuses[index].cause))
    root_status = exit_statuses[root_index]
    is_same_for_all = (
        len(exit_statuses) == len(names) and len({status.words for status in exit_statuses.values()}) == 1
    )
    return root_status if is_same_for_all else root_status.replace_words(f'{names[root_index]}: {root_status.words}')
