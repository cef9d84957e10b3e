"""Interventions: what an experiment writes into its sequences, a pure function of (seed, index)."""

import numpy as np

from sinklab import spec
from sinklab.data.windows import Windows


class Intervened:
    """Windows as a row wants them, the same in every epoch: random tokens are drawn by the seed, side and index."""

    def __init__(self, windows: Windows, data: spec.Data, vocabulary: int, fix: bool):
        self.windows, self.data, self.vocabulary, self.fix = windows, data, vocabulary, fix

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> np.ndarray:
        ids_T = randomized(self.windows[index], self.data, self.vocabulary, f'{self.windows.side} {index}')
        return fixed(ids_T, self.data) if self.fix else ids_T


def fixed(ids_T: np.ndarray, data: spec.Data) -> np.ndarray:
    """x_k is data.fixed_token for k = data.fixed_position (Table 7)."""
    if data.fixed_position is None:
        return ids_T
    ids_T = ids_T.copy()
    ids_T[..., data.fixed_position - 1] = data.fixed_token
    return ids_T


def randomized(ids_T: np.ndarray, data: spec.Data, vocabulary: int, name: str) -> np.ndarray:
    """x_k is uniform over the vocabulary for k from data.random_first to random_last (section 5 of the paper)."""
    if data.random_first is None:
        return ids_T
    rng = np.random.default_rng([data.seed, *name.encode()])
    ids_T = ids_T.copy()
    places = slice(data.random_first - 1, data.random_last)
    ids_T[places] = rng.integers(vocabulary, size=ids_T[places].shape)
    return ids_T
