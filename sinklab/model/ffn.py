import functools
from collections.abc import Callable

import jax
from flax import nnx

from sinklab import spec
from sinklab.model.initialization import INITIALIZATIONS, make_normal_param
from sinklab.model.parameter import param_einsum
from jax.ad_checkpoint import checkpoint_name
from sinklab.sharding import constrain_sharding

exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
FFN_ACTIVATIONS = {  # activation, whether it is a gate
    'relu': (jax.nn.relu, False),
    'gelu': (exact_gelu, False),
    'swish': (jax.nn.silu, False),
    'reglu': (jax.nn.relu, True),
    'geglu': (exact_gelu, True),
    'swiglu': (jax.nn.silu, True),
}


class FFN(nnx.Module):
    """activation(x W_in) W_out, or gated: (activation(x W_gate) * x W_in) W_out (Shazeer, 2020)."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        init = INITIALIZATIONS[model.initialization]
        input_args = (model.width, model.ffn_width), init.linear(model, model.width), ('embed', 'ffn')
        self.activation, is_gated = FFN_ACTIVATIONS[model.ffn]
        self.gate_DF = make_normal_param(rngs, *input_args, inputs=1) if is_gated else None
        self.in_DF = make_normal_param(rngs, *input_args, inputs=1)
        std = init.ffn_output(model, model.ffn_width)
        self.out_FD = make_normal_param(rngs, (model.ffn_width, model.width), std, ('ffn', 'embed'), inputs=1)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        in_BTF = checkpoint_name(param_einsum('BTD,DF->BTF', x_BTD, self.in_DF), 'ffn')
        gate_BTF = None if self.gate_DF is None else checkpoint_name(param_einsum('BTD,DF->BTF', x_BTD, self.gate_DF), 'ffn')
        hidden_BTF = constrain_sharding(activate(self.activation, in_BTF, gate_BTF), 'batch', None, 'ffn')
        return param_einsum('BTF,FD->BTD', hidden_BTF, self.out_FD)


@functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)  # the scan over layers is barrier enough
def activate(activation: Callable, in_BTF: jax.Array, gate_BTF: jax.Array | None) -> jax.Array:
    """activation(in), or activation(gate) * in, whose own steps no backward pass keeps."""
    return activation(in_BTF) if gate_BTF is None else in_BTF * activation(gate_BTF)
