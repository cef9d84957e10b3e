"""From parameters and tokens to what the last layer says, for whoever needs it: loss, evaluation, probe."""

from collections.abc import Callable

import jax
from flax import nnx

from sinklab.spec import Spec
from sinklab.train import state
from sinklab.train.structure import structure


def forward(spec: Spec, **how) -> Callable:
    """run(params, ids_BT) -> (hidden_BTD, head_VD, Capture)."""
    graph, _ = state.architecture(spec)

    def run(params: dict, ids_BT: jax.Array) -> tuple:
        model = nnx.merge(graph, params)
        hidden_BTD, captured = model.hidden(ids_BT, **structure(ids_BT, spec) | how)
        return hidden_BTD, model.head[...], captured

    return run
