"""Windows: rows of T + 1 ids, so that T of them have a next one to predict."""

import bisect
import itertools
from collections.abc import Iterable

import numpy as np

from sinklab.data.store.store import TokenArray
from sinklab.record import UserError
from sinklab.targets import exclude_from_loss

MAX_WINDOWS_PER_READ = 64  # windows of one request, at most


class Windows:
    """Disjoint blocks of T + 1 ids of each domain's tokens, by index; of a share of them, drawn by the seed.

    With `masked`, ids that are not to be predicted stand as `targets` has them.
    """

    def __init__(
        self, token_arrays: list[TokenArray], length: int, label: str, share: float = 1, seed: int = 0, masked: bool = False
    ):
        self.token_arrays, self.size, self.label, self.masked = token_arrays, length + 1, label, masked
        self.ends = list(itertools.accumulate(len(tokens) // self.size for tokens in token_arrays))
        count = self.ends[-1]
        if count < 1:
            problem = f'the side {label!r} has {sum(map(len, token_arrays))} tokens and a window takes {self.size}'
            raise UserError(f'{problem}; lower config.data.length, or bring more text')
        self.count = max(1, round(share * count))
        self.numbers = np.random.default_rng(seed).permutation(count)[: self.count] if share < 1 else range(count)

    def __len__(self) -> int:
        return self.count

    def get_number(self, index: int) -> int:
        """Which window of the whole side it is."""
        return int(self.numbers[index])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(self.get_number(index))

    def read(self, number: int, count: int = 1) -> np.ndarray:
        """The ids of a window of the whole side, and of so many that follow it in the same row."""
        part = bisect.bisect_right(self.ends, number)
        start = (number - (self.ends[part - 1] if part else 0)) * self.size
        tokens, end = self.token_arrays[part], start + count * self.size
        ids_T = tokens.read_ids(start, end).astype(np.int32)
        return np.where(tokens.read_loss_mask(start, end), ids_T, exclude_from_loss(ids_T)) if self.masked else ids_T

    def group_consecutive(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """(first, count) of those that follow each other, and can be read at once."""
        runs = []
        for number in sorted(set(numbers)):
            first, count = runs[-1] if runs else (number, 0)
            if first + count == number and count < MAX_WINDOWS_PER_READ and (not count or number not in self.ends):
                runs[-1:] = [(first, count + 1)]
            else:
                runs.append((number, 1))
        return runs
