"""What a layer's choice among keys is worth: the loss where its queries are 0, so that no key's score is its own."""

import numpy as np

from sinklab.measure.spikes import name_by_layer
from sinklab.observe.subject import MeasurableModel
from sinklab.record import UserError


def measure_selection(model: MeasurableModel, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> dict[str, float]:
    """selection/L: by how much the loss of these texts rises where the queries of that layer are 0, in nats."""
    if not hasattr(model, 'without_queries'):
        raise UserError(f'--selection is of runs, and {model.name} is none; leave it out')
    loss = np.nanmean(model.compute_loss(ids_PT, position_T))
    silenced_models = (model.without_queries(layer) for layer in range(model.spec.model.layers))
    return name_by_layer('selection', np.array([np.nanmean(silenced_model.loss(ids_PT, position_T)) - loss for silenced_model in silenced_models]))
