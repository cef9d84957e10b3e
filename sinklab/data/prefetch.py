"""Results that a thread computes ahead."""

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar('Item')
Result = TypeVar('Result')


def prefetch(function: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Generator[Result, None, None]:
    """Yield function(item) in order; one background thread computes up to `depth` results ahead.

    An error of the function is raised in the place of its result, and ends the iterator. Close the iterator to stop
    the thread; that waits for the result in progress.
    """
    pending: collections.deque[Future[Result]] = collections.deque()
    pool = ThreadPoolExecutor(1)
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
