"""Callbacks of the training loop."""

from collections.abc import Callable


class Listener:
    """Hears of a run while it goes on; this one lets everything pass."""

    def note(self, line: str) -> None:
        """Something that whoever reads the terminal should know."""

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        """An attempt goes on from a step: what computes attention now, and did before; what has changed there."""

    def record(self, record: dict, written: bool) -> None:
        """The numbers of every step, and whether metrics.jsonl has them."""


class BestEffort(Listener):
    """A listener whose errors end it and not the run: each kind of mirror copies what metrics.jsonl already holds.

    Args:
        listener: what is called until it raises an exception for the first time.
        name: what the warning calls it.
        warn: called once, with a line that says what happened.
    """

    def __init__(self, listener: Listener, name: str, warn: Callable[[str], None]):
        self.listener, self.name, self.warn = listener, name, warn

    def note(self, line: str) -> None:
        self._call('note', line)

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        self._call('begin', step, attention, changes)

    def record(self, record: dict, written: bool) -> None:
        self._call('record', record, written)

    def _call(self, method: str, *arguments: object) -> None:
        if self.listener is None:
            return
        try:
            getattr(self.listener, method)(*arguments)
        except Exception as error:
            self.listener = None
            words = ' '.join(str(error).split())
            self.warn(
                f'{self.name}: {type(error).__name__}: {words}; nothing more is written there, training goes on'
            )
