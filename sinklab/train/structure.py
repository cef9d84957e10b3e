"""Where documents lie in windows of tokens; NumPy or JAX arrays in, JAX arrays out."""

import jax
import jax.numpy as jnp

from sinklab import spec


def find_document_starts(ids_BT: jax.Array, end_token: int) -> jax.Array:
    """start_BT: the place where the document of each token starts, in its window."""
    position_T = jnp.arange(ids_BT.shape[1])
    is_first_BT = jnp.pad(ids_BT[:, :-1] == end_token, ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first_BT, position_T, 0), axis=1)


def make_document_inputs(ids_BT: jax.Array, spec: spec.Spec) -> dict[str, jax.Array]:
    """What a model reads beside its tokens: nothing, in most rows."""
    inputs = {}
    if spec.model.mask.document:
        inputs['start_BT'] = find_document_starts(ids_BT, spec.data.end_token)
    if spec.data.positions == 'reset':
        inputs['position_BT'] = jnp.arange(ids_BT.shape[1]) - find_document_starts(ids_BT, spec.data.end_token)
    return inputs
