import functools

import jax
from flax import nnx

from sinklab import spec
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.parameter import product
from sinklab.model.remat import kept
from sinklab.sharding import place

gelu = functools.partial(jax.nn.gelu, approximate=False)
FFNS = {  # activation, whether it is a gate
    'relu': (jax.nn.relu, False),
    'gelu': (gelu, False),
    'swish': (jax.nn.silu, False),
    'reglu': (jax.nn.relu, True),
    'geglu': (gelu, True),
    'swiglu': (jax.nn.silu, True),
}


class FFN(nnx.Module):
    """activation(x W_in) W_out, or gated: (activation(x W_gate) * x W_in) W_out (Shazeer, 2020)."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        init = INITIALIZATIONS[model.initialization]
        inward = (model.width, model.ffn_width), init.linear(model, model.width), ('embed', 'ffn')
        self.activation, gated = FFNS[model.ffn]
        self.gate_DF = normal(rngs, *inward, inputs=1) if gated else None
        self.in_DF = normal(rngs, *inward, inputs=1)
        std = init.ffn_output(model, model.ffn_width)
        self.out_FD = normal(rngs, (model.ffn_width, model.width), std, ('ffn', 'embed'), inputs=1)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        hidden_BTF = kept(product('BTD,DF->BTF', x_BTD, self.in_DF), 'ffn')
        if self.gate_DF is None:
            hidden_BTF = self.activation(hidden_BTF)
        else:
            hidden_BTF *= self.activation(kept(product('BTD,DF->BTF', x_BTD, self.gate_DF), 'ffn'))
        return product('BTF,FD->BTD', place(hidden_BTF, 'batch', None, 'ffn'), self.out_FD)
