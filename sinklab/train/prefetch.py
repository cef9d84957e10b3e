"""Prefetching of batches in a background thread."""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar('T')
JOIN_TIMEOUT_SECONDS = 5.0  # seconds for what is being made when it is closed; what hangs is left behind


class Prefetcher(Generic[T]):
    """function(number) for each of some numbers, in their order: a thread of its own is at most `lag` of them ahead.

    What it raises is raised where that number's turn is.
    """

    def __init__(self, function: Callable[[int], T], indices: Iterable[int], depth: int):
        self.function, self.indices = function, indices
        self.free_slots, self.results, self.is_closed = threading.Semaphore(depth), queue.SimpleQueue(), False
        self.thread = threading.Thread(target=self.run_worker, daemon=True)
        self.thread.start()

    def run_worker(self) -> None:
        for index in self.indices:
            self.free_slots.acquire()
            if self.is_closed:
                return
            try:
                self.results.put((self.function(index), None))
            except BaseException as error:
                self.results.put((None, error))

    def get(self) -> T:
        """What comes next; it makes room for one more."""
        result, error = self.results.get()
        self.free_slots.release()
        if error:
            raise error
        return result

    def close(self) -> None:
        self.is_closed = True
        self.free_slots.release()
        self.thread.join(JOIN_TIMEOUT_SECONDS)
