import jax
from flax import nnx

from sinklab import spec
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.sharding import place


class SwiGLU(nnx.Module):
    """(swish(x W_gate) * x W_in) W_out."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        init = INITIALIZATIONS[model.initialization]
        inward = (model.width, model.ffn_width), init.linear(model, model.width), ('embed', 'ffn')
        self.gate_DF = normal(rngs, *inward)
        self.in_DF = normal(rngs, *inward)
        std = init.ffn_output(model, model.ffn_width)
        self.out_FD = normal(rngs, (model.ffn_width, model.width), std, ('ffn', 'embed'))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate, inner = (x_BTD @ w[...].astype(x_BTD.dtype) for w in (self.gate_DF, self.in_DF))
        hidden_BTF = place(jax.nn.silu(gate) * inner, 'batch', None, 'ffn')
        return hidden_BTF @ self.out_FD[...].astype(x_BTD.dtype)
