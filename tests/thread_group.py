"""Threads in the place of processes: a group of them, and a crowd."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Threads:
    """One of several threads; all of them come to the same names in the same order."""

    def __init__(self, index: int, said: list, barrier: threading.Barrier):
        self.index, self.count, self.said, self.barrier = index, len(said), said, barrier

    def gather(self, name: str, value: Any) -> list[Any]:
        self.said[self.index] = name, value
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        assert {other for other, _ in heard} == {name}
        return [value for _, value in heard]

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        pass


def crowd(count: int, function: Callable[[], None]) -> None:
    """Has many do the same at the same time."""
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def alike(count: int, function: Callable[[Threads], Any]) -> list[Any]:
    """What a function returns, or raises, for each member of a group."""
    said, barrier = [None] * count, threading.Barrier(count, timeout=60)

    def of(index: int) -> Any:
        try:
            return function(Threads(index, said, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(of, range(count)))
