"""Interventions: what an experiment writes into its sequences, a pure function of (seed, window)."""

import numpy as np

from sinklab import spec
from sinklab.data.sequences.windows import Windows
from sinklab.targets import is_predicted, unpredicted


class Intervened:
    """Windows as a row wants them, the same in every epoch; what is random is drawn by the seed and the window."""

    def __init__(self, windows: Windows, data: spec.Data, vocabulary: int, fix: bool):
        self.windows, self.data, self.vocabulary, self.fix = windows, data, vocabulary, fix

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.changed(index, self.windows[index])

    def changed(self, index: int, ids_T: np.ndarray) -> np.ndarray:
        """What becomes of the ids of a window."""
        name = f'{self.windows.label} {self.windows.number(index)}'
        ids_T = with_random_tokens(ids_T, self.data, self.vocabulary, name)
        return with_fixed_token(ids_T, self.data) if self.fix else ids_T


def with_fixed_token(ids_T: np.ndarray, data: spec.Data) -> np.ndarray:
    """x_k is data.fixed_token for k = data.fixed_position (Table 7)."""
    if data.fixed_position is None:
        return ids_T
    ids_T = ids_T.copy()
    place = (..., data.fixed_position - 1)
    ids_T[place] = replacement(data.fixed_token, ids_T[place])
    return ids_T


def with_random_tokens(ids_T: np.ndarray, data: spec.Data, vocabulary: int, name: str) -> np.ndarray:
    """x_k is uniform over the vocabulary for k from data.random_first to random_last (section 5 of the paper)."""
    if data.random_first is None:
        return ids_T
    rng = np.random.default_rng([data.seed, *name.encode()])
    ids_T = ids_T.copy()
    places = slice(data.random_first - 1, data.random_last)
    ids_T[places] = replacement(rng.integers(vocabulary, size=ids_T[places].shape), ids_T[places])
    return ids_T


def replacement(ids: np.ndarray | int, before: np.ndarray) -> np.ndarray:
    """The ids, as complements where those before them were: what is not predicted stays so."""
    return np.where(is_predicted(before), ids, unpredicted(np.asarray(ids)))
