"""Callbacks of the training loop."""

from collections.abc import Callable
from typing import Any


class Callback:
    """A callback of the training loop: the methods below are called on process 0 while a run trains.

    This one does nothing; derive from it and override what you need. Pass listeners to `sinklab.train.loop.train`.
    The terminal, TensorBoard and Weights & Biases are listeners. An exception ends the run; wrap a listener in
    `BestEffort` where training should go on without it.
    """

    def on_message(self, line: str) -> None:
        """Receive a line for whoever reads the terminal."""

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        """Receive the start of an attempt, the first one or one that resumes.

        Args:
            step: The step that training goes on from; 0 for a new run.
            attention: The backend that computes attention, and why others were not taken.
            changes: Fields of the config that differ from the attempt before, a line each.
        """

    def on_record(self, record: dict[str, Any], written: bool) -> None:
        """Receive the numbers of a step.

        Args:
            record: Numbers by name, as in metrics.jsonl, with `step`.
            written: Whether metrics.jsonl has this record: steps between two logged ones are not written.
        """


class BestEffortCallback(Callback):
    """A listener whose errors end it and not the run: each kind of mirror copies what metrics.jsonl already holds.

    Args:
        listener: what is called until it raises an exception for the first time.
        name: what the warning calls it.
        warn: called once, with a line that says what happened.
    """

    def __init__(self, callback: Callback, name: str, warn: Callable[[str], None]):
        self.callback: Callback | None = callback
        self.name, self.warn = name, warn

    def on_message(self, line: str) -> None:
        self._call('note', line)

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        self._call('begin', step, attention, changes)

    def on_record(self, record: dict[str, Any], written: bool) -> None:
        self._call('record', record, written)

    def _call(self, method: str, *arguments: object) -> None:
        if self.callback is None:
            return
        try:
            getattr(self.callback, method)(*arguments)
        except Exception as error:
            self.callback = None
            message = ' '.join(str(error).split())
            self.warn(
                f'{self.name}: {type(error).__name__}: {message}; nothing more is written there, training goes on'
            )
