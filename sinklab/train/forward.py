"""From parameters and tokens to what the last layer says, for whoever needs it: loss, evaluation, probe."""

from collections.abc import Callable

import jax
from flax import nnx

from sinklab.spec import Spec
from sinklab.train import state
from sinklab.train.structure import make_document_inputs


def make_forward(spec: Spec, **model_options) -> Callable:
    """run(params, ids_BT) -> (hidden_BTD, head_VD, Capture)."""
    graphdef, _ = state.make_abstract_model(spec)

    def apply_model(params: dict, ids_BT: jax.Array) -> tuple:
        model = nnx.merge(graphdef, params)
        hidden_BTD, intermediates = model.hidden(ids_BT, **make_document_inputs(ids_BT, spec) | model_options)
        return hidden_BTD, model.head[...], intermediates

    return apply_model
