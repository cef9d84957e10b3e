"""Feature maps: what queries and keys pass through, after positions and before their product."""

import jax
from flax import nnx

from sinklab import spec
from sinklab.attend.similarity import elu_plus_one
from sinklab.model.initialization import INITIALIZATIONS, make_normal_param
from sinklab.model.parameter import param_einsum


class IdentityMap(nnx.Module):
    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        pass

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        return x_BTHK


class Elu1Map(IdentityMap):
    """elu(x) + 1."""

    def __call__(self, x_BTHK):
        return elu_plus_one(x_BTHK)


class MLPMap(IdentityMap):
    """relu(x W_in) W_out, one for queries and keys and for all heads of a layer."""

    def __init__(self, model, rngs):
        std = INITIALIZATIONS[model.initialization].linear(model, model.head_width)
        shape = (model.head_width, model.head_width)
        self.in_KK = make_normal_param(rngs, shape, std, (None, None), inputs=1)
        self.out_KK = make_normal_param(rngs, shape, std, (None, None), inputs=1)

    def __call__(self, x_BTHK):
        hidden_BTHJ = jax.nn.relu(param_einsum('BTHK,KJ->BTHJ', x_BTHK, self.in_KK))
        return param_einsum('BTHJ,JK->BTHK', hidden_BTHJ, self.out_KK)


FEATURE_MAPS = {'identity': IdentityMap, 'elu1': Elu1Map, 'mlp': MLPMap}
