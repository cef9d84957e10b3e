"""A text by itself, as training would show its beginning to a model."""

import numpy as np

from sinklab import spec
from sinklab.record import UserError
from sinklab.targets import strip_loss_mask, exclude_from_loss


def add_training_tokens(ids_T: np.ndarray, data: spec.DataConfig) -> np.ndarray:
    """With BOS before it and the fixed token at its place, if training has them there; neither is predicted."""
    added_token = exclude_from_loss(data.fixed_token)
    if data.bos == 'documents':
        ids_T = np.insert(ids_T, 0, added_token)
    if data.fixed_position is None:
        return ids_T
    position = data.fixed_position - 1
    if len(ids_T) < position:
        raise UserError(
            f'the text has {len(ids_T)} tokens, and training had token {data.fixed_token} at place '
            f'{data.fixed_position}; give at least {position}'
        )
    if strip_loss_mask(ids_T[position : position + 1]).tolist() == [data.fixed_token]:
        return ids_T
    return np.insert(ids_T, position, added_token)
