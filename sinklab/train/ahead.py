"""What is wanted one after another, made before it is asked for."""

import collections
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar('T')


class Ahead(Generic[T]):
    """function(number) for each of some numbers, in their order: a thread of its own is at most `lag` of them ahead.

    What it raises is raised where that number's turn is. It is left where it is once it is closed.
    """

    def __init__(self, function: Callable[[int], T], numbers: Iterable[int], lag: int):
        self.function, self.numbers = function, iter(numbers)
        self.pool = ThreadPoolExecutor(1, 'ahead')
        self.begun: collections.deque[Future[T]] = collections.deque()
        self.begin(lag)

    def begin(self, count: int) -> None:
        self.begun.extend(self.pool.submit(self.function, number) for number in itertools.islice(self.numbers, count))

    def take(self) -> T:
        """What comes next; once it is taken, one more is begun."""
        found = self.begun.popleft().result()
        self.begin(1)
        return found

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
