"""Threads in place of processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ThreadMember:
    """Process group of one of several threads, which all gather in the same order."""

    def __init__(self, index: int, slots: list, barrier: threading.Barrier):
        self.process_index, self.process_count, self.slots, self.barrier = index, len(slots), slots, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self.slots[self.process_index] = value
        self.barrier.wait()
        entries = list(self.slots)
        self.barrier.wait()
        return entries


def run_group(count: int, function: Callable[[ThreadMember], Any]) -> list[Any]:
    """Return what a function returns or raises for each member of a group."""
    slots, barrier = [None] * count, threading.Barrier(count, timeout=60)

    def run_member(index: int) -> Any:
        try:
            return function(ThreadMember(index, slots, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_member, range(count)))
