"""What is wanted one after another, made before it is asked for."""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar('T')
LEAVE = 5.0  # seconds for what is being made when it is closed; what hangs is left behind


class Ahead(Generic[T]):
    """function(number) for each of some numbers, in their order: a thread of its own is at most `lag` of them ahead.

    What it raises is raised where that number's turn is.
    """

    def __init__(self, function: Callable[[int], T], numbers: Iterable[int], lag: int):
        self.function, self.numbers = function, numbers
        self.room, self.made, self.closed = threading.Semaphore(lag), queue.SimpleQueue(), False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        for number in self.numbers:
            self.room.acquire()
            if self.closed:
                return
            try:
                self.made.put((self.function(number), None))
            except BaseException as error:
                self.made.put((None, error))

    def take(self) -> T:
        """What comes next; it makes room for one more."""
        found, error = self.made.get()
        self.room.release()
        if error:
            raise error
        return found

    def close(self) -> None:
        self.closed = True
        self.room.release()
        self.thread.join(LEAVE)
