"""Prefetching of batches in a background thread."""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

CLOSE_SECONDS = 5.0  # seconds that `close` waits for the thread; one that hangs is abandoned
T = TypeVar('T')


class Prefetcher(Generic[T]):
    """Prefetcher of function(index) for each index, up to `depth` results ahead, in a background thread.

    An error of the function is raised by the call of `get` for the same index.
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
        """Return the next result, which frees a slot."""
        result, error = self.results.get()
        self.free_slots.release()
        if error:
            raise error
        return result

    def close(self) -> None:
        self.is_closed = True
        self.free_slots.release()
        self.thread.join(CLOSE_SECONDS)
