import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import spec
from sinklab.attend import dense
from sinklab.attend.mask import Mask
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.positions import POSITIONS
from sinklab.sharding import place


class SelfAttention(nnx.Module):
    """x -> sum over heads of attend(x W_Q, x W_K, x W_V) W_O, without biases."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        self.model = model
        init = INITIALIZATIONS[model.initialization]
        inward = (model.width, model.heads, model.head_width), init.linear(model, model.width)
        self.query_DHK = normal(rngs, *inward, ('embed', 'heads', 'head_width'))
        self.key_DHK = normal(rngs, *inward, ('embed', 'heads', 'head_width'))
        self.value_DHK = normal(rngs, *inward, ('embed', 'heads', 'head_width'))
        outward = (model.heads, model.head_width, model.width)
        std = init.attention_output(model, model.heads * model.head_width)
        self.output_HKD = normal(rngs, outward, std, ('heads', 'head_width', 'embed'))

    def __call__(self, x_BTD: jax.Array, mask: Mask) -> tuple[jax.Array, jax.Array]:
        """(output_BTD, attention_BHTS)."""
        query_BTHK, key_BTHK, value_BTHK = (
            place(jnp.einsum('BTD,DHK->BTHK', x_BTD, w[...].astype(x_BTD.dtype)), 'batch', None, 'heads', None)
            for w in (self.query_DHK, self.key_DHK, self.value_DHK)
        )
        query_BTHK, key_BTHK = POSITIONS[self.model.position].rotate(query_BTHK, key_BTHK)
        head_BTHK, attention_BHTS = dense.attend(query_BTHK, key_BTHK, value_BTHK, self.model.attention, mask)
        return jnp.einsum('BTHK,HKD->BTD', head_BTHK, self.output_HKD[...].astype(x_BTD.dtype)), attention_BHTS
