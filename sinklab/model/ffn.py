import functools
from collections.abc import Callable

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
        in_BTF = kept(product('BTD,DF->BTF', x_BTD, self.in_DF), 'ffn')
        gate_BTF = None if self.gate_DF is None else kept(product('BTD,DF->BTF', x_BTD, self.gate_DF), 'ffn')
        inside_BTF = place(inside(self.activation, in_BTF, gate_BTF), 'batch', None, 'ffn')
        return product('BTF,FD->BTD', inside_BTF, self.out_FD)


@functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)  # the scan over layers is barrier enough
def inside(activation: Callable, in_BTF: jax.Array, gate_BTF: jax.Array | None) -> jax.Array:
    """activation(in), or activation(gate) * in, whose own steps no backward pass keeps."""
    return activation(in_BTF) if gate_BTF is None else in_BTF * activation(gate_BTF)
