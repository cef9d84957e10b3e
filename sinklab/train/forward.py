"""The forward pass of a run's model as a function of parameters and token ids."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab.config.spec import Spec
from sinklab.train import state


def find_document_starts(ids_BT: jax.Array, end_token: int) -> jax.Array:
    """Return start_BT: the position in the window at which the document of each token starts."""
    position_T = jnp.arange(ids_BT.shape[1])
    is_first_BT = jnp.pad(ids_BT[:, :-1] == end_token, ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first_BT, position_T, 0), axis=1)


def make_document_inputs(ids_BT: jax.Array, spec: Spec) -> dict[str, jax.Array]:
    """Make the keyword arguments of the model that depend on document boundaries; usually none."""
    inputs = {}
    if spec.model.mask.document:
        inputs['start_BT'] = find_document_starts(ids_BT, spec.data.end_token)
    if spec.data.positions == 'reset':
        inputs['position_BT'] = jnp.arange(ids_BT.shape[1]) - find_document_starts(ids_BT, spec.data.end_token)
    return inputs


def make_hidden_states_fn(spec: Spec, **model_options) -> Callable:
    """Make a function (params, ids_BT) -> (hidden_BTD, head_VD, Intermediates)."""
    graphdef, _ = state.make_abstract_model(spec)

    def apply_model(params: dict, ids_BT: jax.Array) -> tuple:
        model = nnx.merge(graphdef, params)
        hidden_BTD, intermediates = model.compute_hidden(ids_BT, **make_document_inputs(ids_BT, spec) | model_options)
        return hidden_BTD, model.head[...], intermediates

    return apply_model
