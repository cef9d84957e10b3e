"""How a process ends, how a group of them does, and the exit codes of both."""

import dataclasses
import signal
import traceback
from typing import Literal

from sinklab.record import Refusal

# What a process, or all of them, have ended of -> (kind in outcome.json, exit code). Of several, the first in this
# order has caused the others: a process that is killed makes others raise and abort, and none of those kills it.
CAUSES = {
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
KIND_OF = {code: kind for kind, code in reversed(CAUSES.values())}
OF_SIGNAL = {signal.SIGINT: 'interrupted', signal.SIGHUP: 'stopped', signal.SIGTERM: 'stopped'}
TOGETHER = 1.0  # seconds within which a terminal, a scheduler and a sweep send the same signal
Cause = Literal[tuple(CAUSES)]
STOPPING = 'stopping after this step; once more to stop at once'


@dataclasses.dataclass(frozen=True)
class End:
    """Why something has ended, in the words of one line."""

    cause: Cause
    words: str = ''
    trace: str = ''  # for who has to mend it
    orderly: bool = False  # the others are about to end alike

    def __post_init__(self):
        for name in ('words', 'trace'):
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def kind(self) -> str:
        return CAUSES[self.cause][0]

    @property
    def code(self) -> int:
        return CAUSES[self.cause][1]

    @property
    def wrong(self) -> bool:
        """Whether something is to be looked into."""
        return self.kind in ('lost', 'crashed')

    def with_words(self, words: str) -> 'End':
        return dataclasses.replace(self, words=words)


def printable(text: str) -> str:
    """Escape what a terminal would obey, and what has no UTF-8; line breaks and tabs stay."""
    return ''.join(one if one.isprintable() or one in '\n\t' else ascii(one)[1:-1] for one in text)


def of_exit(code: int, begun: bool, noise: str) -> End:
    """Of a process that has left without a word; `code` is minus a signal where one has killed it."""
    if -code in OF_SIGNAL:
        return at_once(-code) if begun else before(-code)
    if code == -signal.SIGABRT:
        return End('aborted', 'aborted by the runtime of jax')
    if code < 0:
        return End('killed', f'killed by {signal.Signals(-code).name}')
    return End('crashed', f'exit code {code}, without a word', noise)


def describe_error(error: Exception) -> End:
    """Return the end of a run in which what watches over its processes has failed."""
    if isinstance(error, Refusal):
        return End('refused', str(error))
    words = ' '.join(traceback.format_exception_only(error)[-1].split())
    return End('crashed', words, ''.join(traceback.format_exception(error)))


def before(number: int) -> End:
    return End(OF_SIGNAL[number], f'{signal.Signals(number).name} came before the first step; nothing was begun')


def at_once(number: int) -> End:
    return End(OF_SIGNAL[number], 'stopped at once; what was saved before is intact')


def of_group(ends: dict[int, End], names: list[str]) -> End:
    """How all have ended, of how each has, in the order in which that was heard."""
    root = min(ends, key=lambda index: [*CAUSES].index(ends[index].cause))
    first = ends[root]
    alike = len(ends) == len(names) and len({end.words for end in ends.values()}) == 1
    return first if alike else first.with_words(f'{names[root]}: {first.words}')
