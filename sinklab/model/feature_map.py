"""Feature maps: what queries and keys pass through, after positions and before their product."""

import jax
from flax import nnx

from sinklab import spec
from sinklab.attend.similarity import elu_plus_one
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.parameter import product


class Identity(nnx.Module):
    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        pass

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        return x_BTHK


class Elu1(Identity):
    """elu(x) + 1."""

    def __call__(self, x_BTHK):
        return elu_plus_one(x_BTHK)


class MLP(Identity):
    """relu(x W_in) W_out, one for queries and keys and for all heads of a layer."""

    def __init__(self, model, rngs):
        std = INITIALIZATIONS[model.initialization].linear(model, model.head_width)
        shape = (model.head_width, model.head_width)
        self.in_KK = normal(rngs, shape, std, (None, None), inputs=1)
        self.out_KK = normal(rngs, shape, std, (None, None), inputs=1)

    def __call__(self, x_BTHK):
        hidden_BTHJ = jax.nn.relu(product('BTHK,KJ->BTHJ', x_BTHK, self.in_KK))
        return product('BTHJ,JK->BTHK', hidden_BTHJ, self.out_KK)


FEATURE_MAPS = {'identity': Identity, 'elu1': Elu1, 'mlp': MLP}
