"""Interventions: what an experiment writes into its sequences, training and held-out alike."""

import numpy as np

from sinklab import spec
from sinklab.data.tokens import FIXED_TOKEN


def intervene(ids_BT: np.ndarray, data: spec.Data) -> np.ndarray:
    """The sequences as a row wants them: x_k is FIXED_TOKEN for k = data.fixed_position (Table 7)."""
    if data.fixed_position is None:
        return ids_BT
    ids_BT = ids_BT.copy()
    ids_BT[:, data.fixed_position - 1] = FIXED_TOKEN
    return ids_BT
