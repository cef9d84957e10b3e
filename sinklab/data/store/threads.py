"""Threads for what waits on a network; they end with their process, whatever hangs in them."""

import contextvars
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

READERS = 64  # ranges that a process reads at once
FETCHERS = 4  # files that it fetches whole at once


class Threads:
    """So many at most, each begun when there is something for it to do."""

    def __init__(self, most: int):
        self.most, self.begun = most, 0
        self.wanted, self.lock = queue.SimpleQueue(), threading.Lock()

    def submit(self, function: Callable, *given: Any) -> Future:
        future = Future()
        self.wanted.put((future, functools.partial(contextvars.copy_context().run, function, *given)))
        with self.lock:
            if self.begun < self.most:
                self.begun += 1
                threading.Thread(target=self.work, daemon=True).start()
        return future

    def work(self) -> None:
        while True:
            future, function = self.wanted.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def map(self, function: Callable, items: Iterable) -> list:
        """What a function makes of each, in their order; of one alone without another thread."""
        items = list(items)
        if len(items) == 1:
            return [function(items[0])]
        return [future.result() for future in [self.submit(function, item) for item in items]]


@functools.cache
def readers() -> Threads:
    return Threads(READERS)


@functools.cache
def fetchers() -> Threads:
    return Threads(FETCHERS)
