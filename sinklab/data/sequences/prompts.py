"""A text by itself, as training would show its beginning to a model."""

import numpy as np

from sinklab import spec
from sinklab.record import Refusal
from sinklab.targets import readable, unpredicted


def shaped(ids_T: np.ndarray, data: spec.Data) -> np.ndarray:
    """With BOS before it and the fixed token at its place, if training has them there; neither is predicted."""
    given = unpredicted(data.fixed_token)
    if data.bos == 'documents':
        ids_T = np.insert(ids_T, 0, given)
    if data.fixed_position is None:
        return ids_T
    place = data.fixed_position - 1
    if len(ids_T) < place:
        raise Refusal(
            f'the text has {len(ids_T)} tokens, and training had token {data.fixed_token} at place '
            f'{data.fixed_position}; give at least {place}'
        )
    if readable(ids_T[place : place + 1]).tolist() == [data.fixed_token]:
        return ids_T
    return np.insert(ids_T, place, given)
