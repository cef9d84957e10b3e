"""Windows: rows of T + 1 ids, so that T of them have a next one to predict."""

import bisect
import itertools
from collections.abc import Iterable

import numpy as np

from sinklab.data.store.store import Row
from sinklab.record import Refusal
from sinklab.targets import unpredicted

TOGETHER = 64  # windows of one request, at most


class Windows:
    """Disjoint blocks of T + 1 ids of each domain's tokens, by index; of a share of them, drawn by the seed.

    With `masked`, ids that are not to be predicted stand as `targets` has them.
    """

    def __init__(
        self, rows: list[Row], length: int, label: str, share: float = 1, seed: int = 0, masked: bool = False
    ):
        self.rows, self.size, self.label, self.masked = rows, length + 1, label, masked
        self.ends = list(itertools.accumulate(len(row) // self.size for row in rows))
        count = self.ends[-1]
        if count < 1:
            few = f'the side {label!r} has {sum(map(len, rows))} tokens and a window takes {self.size}'
            raise Refusal(f'{few}; lower config.data.length, or bring more text')
        self.count = max(1, round(share * count))
        self.drawn = np.random.default_rng(seed).permutation(count)[: self.count] if share < 1 else range(count)

    def __len__(self) -> int:
        return self.count

    def number(self, index: int) -> int:
        """Which window of the whole side it is."""
        return int(self.drawn[index])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(self.number(index))

    def read(self, number: int, count: int = 1) -> np.ndarray:
        """The ids of a window of the whole side, and of so many that follow it in the same row."""
        part = bisect.bisect_right(self.ends, number)
        start = (number - (self.ends[part - 1] if part else 0)) * self.size
        row, end = self.rows[part], start + count * self.size
        ids_T = row.ids(start, end).astype(np.int32)
        return np.where(row.loss_mask(start, end), ids_T, unpredicted(ids_T)) if self.masked else ids_T

    def runs(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """(first, count) of those that follow each other, and can be read at once."""
        found = []
        for number in sorted(set(numbers)):
            first, count = found[-1] if found else (number, 0)
            if first + count == number and count < TOGETHER and (not count or number not in self.ends):
                found[-1:] = [(first, count + 1)]
            else:
                found.append((number, 1))
        return found
