"""Pools of daemon threads, and ordered results of work that is submitted ahead.

The threads of `multiprocessing.pool.ThreadPool` are daemon threads: a request that hangs in one of them does not keep
the process from exiting. `concurrent.futures.ThreadPoolExecutor` would wait for it.
"""

import atexit
import collections
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, TypeVar

MAX_READER_THREADS = 64  # ranges that a process reads in parallel
CLOSE_SECONDS = 5.0  # seconds that a closed `prefetch` waits for the item in progress; one that hangs is abandoned
Item, Result = TypeVar('Item'), TypeVar('Result')


@functools.cache
def get_reader_pool() -> ThreadPool:
    return make_pool(MAX_READER_THREADS)


def make_pool(num_threads: int) -> ThreadPool:
    """Make a pool for the life of the process; an unfinished task does not delay the exit."""
    pool = ThreadPool(num_threads)
    atexit.register(pool.terminate)  # without it, the destructor may print an error
    return pool


def submit(pool: ThreadPool, function: Callable, *arguments: Any) -> AsyncResult:
    """Run a function in a pool, with the context variables of the caller."""
    return pool.apply_async(contextvars.copy_context().run, (function, *arguments))


def map_parallel(pool: ThreadPool, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply a function to items in parallel and return the results in order.

    A single item is processed in the calling thread.
    """
    items = list(items)
    if len(items) == 1:
        return [function(items[0])]
    return [result.get() for result in [submit(pool, function, item) for item in items]]


def map_ahead(
    submit_item: Callable[[Item], Callable[[], Result]], items: Iterable[Item], max_pending: int
) -> Iterator[Result]:
    """Yield the results of items in order, with up to `max_pending` of them submitted at once.

    Args:
        submit_item: Function that submits an item, and returns a function that waits for its result.
        items: The items, which are taken when they are submitted.
        max_pending: The largest number of submitted items whose results were not yielded.
    """
    pending = collections.deque()
    for item in items:
        pending.append(submit_item(item))
        if len(pending) >= max_pending:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


def prefetch(function: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Result]:
    """Yield function(item) in order; one background thread computes up to `depth` results ahead.

    An error of the function is raised in the place of its result, and ends the iterator. Close the iterator to stop
    the thread.
    """
    in_progress = threading.Lock()

    def compute_item(item: Item) -> Result:
        with in_progress:
            return function(item)

    try:
        with ThreadPool(1) as pool:  # its end drops the items that have not begun
            yield from map_ahead(lambda item: pool.apply_async(compute_item, (item,)).get, items, depth + 1)
    finally:
        in_progress.acquire(timeout=CLOSE_SECONDS)
