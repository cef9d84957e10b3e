"""What a layer's choice among keys is worth: the loss where its queries are 0, so that no key's score is its own."""

import numpy as np

from sinklab.measure.spikes import by_layer
from sinklab.observe.subject import Subject
from sinklab.record import Refusal


def selection(subject: Subject, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> dict[str, float]:
    """selection/L: by how much the loss of these texts rises where the queries of that layer are 0, in nats."""
    if not hasattr(subject, 'without_queries'):
        raise Refusal(f'--selection is of runs, and {subject.name} is none; leave it out')
    loss = np.nanmean(subject.loss(ids_PT, position_T))
    without = (subject.without_queries(layer) for layer in range(subject.spec.model.layers))
    return by_layer('selection', np.array([np.nanmean(one.loss(ids_PT, position_T)) - loss for one in without]))
