"""Gates: a sigmoid that multiplies what heads aggregate or what they have aggregated."""

import dataclasses
from typing import Literal

import jax
from flax import nnx

from sinklab import spec
from sinklab.model.initialization import INITIALIZATIONS, make_normal_param
from sinklab.model.parameter import param_einsum


@dataclasses.dataclass(frozen=True)
class GateKind:
    input: Literal['x', 'value']  # what opens it: the layer's normed input, or the token's own value
    target: Literal['value', 'output']  # what it multiplies
    is_wide: bool  # one for each dimension of a head, or one for the head
    is_shared: bool = False  # the same for all heads


GATES = {
    'none': None,
    'elementwise': GateKind('x', 'output', is_wide=True),  # Qiu et al., 2025: G1, and the three below
    'headwise': GateKind('x', 'output', is_wide=False),
    'shared': GateKind('x', 'output', is_wide=True, is_shared=True),
    'value': GateKind('x', 'value', is_wide=True),  # their G2
    'value_state': GateKind('value', 'output', is_wide=False),  # Bu et al., 2025
}


class Gate(nnx.Module):
    def __init__(self, model: spec.ModelConfig, value_width: int, rngs: nnx.Rngs):
        self.kind = kind = GATES[model.gate]
        if kind is None:
            return
        inputs = model.width if kind.of == 'x' else value_width
        heads = 1 if kind.shared else model.heads
        shape = (inputs, heads, value_width if kind.wide else 1)
        axes = ('embed' if kind.of == 'x' else None, None if kind.shared else 'heads', None)
        std = INITIALIZATIONS[model.initialization].linear(model, inputs)
        self.weight_DHK = make_normal_param(rngs, shape, std, axes, inputs=1)

    def __call__(self, target: str, array_BTHK: jax.Array, x_BTD: jax.Array, value_BTHK: jax.Array) -> jax.Array:
        """`given` times the gate, if that is what this one multiplies."""
        if self.kind is None or self.kind.on != target:
            return array_BTHK
        if self.kind.of == 'x':
            score_BTHK = param_einsum('BTD,DHK->BTHK', x_BTD, self.weight_DHK)
        else:
            score_BTHK = param_einsum('BTHD,DHK->BTHK', value_BTHK, self.weight_DHK)
        return array_BTHK * jax.nn.sigmoid(score_BTHK)
