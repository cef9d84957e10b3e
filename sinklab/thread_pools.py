"""Pool of daemon threads, and ordered results of work that is submitted ahead."""

import collections
import contextvars
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

MAX_READER_THREADS = 64  # ranges that a process reads in parallel
CLOSE_SECONDS = 5.0  # seconds that a closed `prefetch` waits for the item in progress; one that hangs is abandoned
WAIT_SECONDS = 10.0  # seconds between two calls of `on_wait`
Item, Result = TypeVar('Item'), TypeVar('Result')


class DaemonThreadPool:
    """Pool of daemon threads, started on demand up to `max_threads`.

    A request that hangs in a daemon thread does not keep the process from exiting. The ThreadPoolExecutor of
    concurrent.futures would wait for it, and the ThreadPool of multiprocessing can deadlock when it is terminated.
    """

    def __init__(self, max_threads: int):
        self.max_threads, self.threads = max_threads, []
        self.tasks, self.lock = queue.SimpleQueue(), threading.Lock()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> 'Future[Result]':
        """Run a function in a thread, with the context variables of the caller."""
        future = Future()
        self.tasks.put((future, functools.partial(contextvars.copy_context().run, function, *arguments)))
        with self.lock:
            if len(self.threads) < self.max_threads:
                self.threads.append(threading.Thread(target=self.run_tasks, daemon=True))
                self.threads[-1].start()
        return future

    def run_tasks(self) -> None:
        while task := self.tasks.get():
            future, function = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Apply a function to items in parallel and return the results in order.

        A single item is processed in the calling thread.
        """
        items = list(items)
        if len(items) == 1:
            return [function(items[0])]
        return [future.result() for future in [self.submit(function, item) for item in items]]

    def close(self) -> None:
        """End the threads after the tasks that are submitted, and wait up to CLOSE_SECONDS for them."""
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            thread.join(CLOSE_SECONDS)


@functools.cache
def get_reader_pool() -> DaemonThreadPool:
    return DaemonThreadPool(MAX_READER_THREADS)


def call_in_thread(
    function: Callable[..., Result], *arguments: Any, on_wait: Callable[[], object] = lambda: None
) -> Result:
    """Call a function in a daemon thread and wait, so that Ctrl-C stops the caller while native code computes.

    Args:
        function: The function.
        arguments: Its arguments.
        on_wait: Called every WAIT_SECONDS seconds until the function returns.
    """
    pool = DaemonThreadPool(1)
    future = pool.submit(function, *arguments)
    pool.tasks.put(None)  # the thread ends after the call
    while wait([future], WAIT_SECONDS).not_done:
        on_wait()
    return future.result()


def map_ahead(
    submit: Callable[[Item], 'Future[Result]'], items: Iterable[Item], max_pending: int
) -> Iterator[Result]:
    """Yield the results of items in order, with up to `max_pending` of them submitted at once.

    When the iterator is closed, submitted items that have not begun are cancelled.

    Args:
        submit: Submits an item.
        items: The items, which are taken when they are submitted.
        max_pending: The largest number of submitted items whose results were not yielded.
    """
    pending = collections.deque()
    try:
        for item in items:
            pending.append(submit(item))
            if len(pending) >= max_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def prefetch(function: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Result]:
    """Yield function(item) in order; one background thread computes up to `depth` results ahead.

    An error of the function is raised in the place of its result, and ends the iterator. Close the iterator to stop
    the thread.
    """
    pool = DaemonThreadPool(1)
    results = map_ahead(functools.partial(pool.submit, function), items, depth + 1)
    try:
        yield from results
    finally:
        results.close()
        pool.close()
