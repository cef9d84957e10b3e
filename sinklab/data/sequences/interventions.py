"""Interventions: what an experiment writes into its sequences, a pure function of (seed, window)."""

import numpy as np

from sinklab import spec
from sinklab.data.sequences.windows import Windows
from sinklab.targets import is_in_loss, exclude_from_loss


class TransformedWindows:
    """Windows as a row wants them, the same in every epoch; what is random is drawn by the seed and the window."""

    def __init__(self, windows: Windows, data: spec.DataConfig, vocabulary: int, with_fixed_token: bool):
        self.windows, self.data, self.vocabulary, self.with_fixed_token = windows, data, vocabulary, with_fixed_token

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.apply_interventions(index, self.windows[index])

    def apply_interventions(self, index: int, ids_T: np.ndarray) -> np.ndarray:
        """What becomes of the ids of a window."""
        name = f'{self.windows.label} {self.windows.get_number(index)}'
        ids_T = set_random_tokens(ids_T, self.data, self.vocabulary, name)
        return set_fixed_token(ids_T, self.data) if self.with_fixed_token else ids_T


def set_fixed_token(ids_T: np.ndarray, data: spec.DataConfig) -> np.ndarray:
    """x_k is data.fixed_token for k = data.fixed_position (Table 7)."""
    if data.fixed_position is None:
        return ids_T
    ids_T = ids_T.copy()
    position = (..., data.fixed_position - 1)
    ids_T[position] = copy_loss_mask(data.fixed_token, ids_T[position])
    return ids_T


def set_random_tokens(ids_T: np.ndarray, data: spec.DataConfig, vocabulary: int, name: str) -> np.ndarray:
    """x_k is uniform over the vocabulary for k from data.random_first to random_last (section 5 of the paper)."""
    if data.random_first is None:
        return ids_T
    rng = np.random.default_rng([data.seed, *name.encode()])
    ids_T = ids_T.copy()
    positions = slice(data.random_first - 1, data.random_last)
    ids_T[positions] = copy_loss_mask(rng.integers(vocabulary, size=ids_T[positions].shape), ids_T[positions])
    return ids_T


def copy_loss_mask(ids: np.ndarray | int, original_ids: np.ndarray) -> np.ndarray:
    """The ids, as complements where those before them were: what is not predicted stays so."""
    return np.where(is_in_loss(original_ids), ids, exclude_from_loss(np.asarray(ids)))
