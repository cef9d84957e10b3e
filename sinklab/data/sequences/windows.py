"""Windows: rows of T + 1 ids, so that T of them have a next one to predict."""

import bisect
import itertools

import numpy as np

from sinklab.data.store.store import Row
from sinklab.record import Refusal
from sinklab.targets import unpredicted


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
        number = self.number(index)
        part = bisect.bisect_right(self.ends, number)
        start = (number - (self.ends[part - 1] if part else 0)) * self.size
        row, end = self.rows[part], start + self.size
        ids_T = row.ids(start, end).astype(np.int32)
        return np.where(row.loss_mask(start, end), ids_T, unpredicted(ids_T)) if self.masked else ids_T
