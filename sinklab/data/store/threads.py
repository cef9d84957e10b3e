"""Threads for what waits on a network; they end with their process, whatever hangs in them."""

import contextvars
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

MAX_READER_THREADS = 64  # ranges that a process reads at once
MAX_FETCHER_THREADS = 4  # files that it fetches whole at once


class DaemonThreadPool:
    """So many at most, each begun when there is something for it to do."""

    def __init__(self, max_threads: int):
        self.max_threads, self.num_threads = max_threads, 0
        self.tasks, self.lock = queue.SimpleQueue(), threading.Lock()

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future = Future()
        self.tasks.put((future, functools.partial(contextvars.copy_context().run, function, *arguments)))
        with self.lock:
            if self.num_threads < self.max_threads:
                self.num_threads += 1
                threading.Thread(target=self.run_tasks, daemon=True).start()
        return future

    def run_tasks(self) -> None:
        while True:
            future, function = self.tasks.get()
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
def get_reader_pool() -> DaemonThreadPool:
    return DaemonThreadPool(MAX_READER_THREADS)


@functools.cache
def get_fetcher_pool() -> DaemonThreadPool:
    return DaemonThreadPool(MAX_FETCHER_THREADS)
