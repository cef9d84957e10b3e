"""Gates: a sigmoid that multiplies what heads aggregate or what they have aggregated."""

import dataclasses
from typing import Literal

import jax
from flax import nnx

from sinklab import spec
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.parameter import product


@dataclasses.dataclass(frozen=True)
class Kind:
    of: Literal['x', 'value']  # what opens it: the layer's normed input, or the token's own value
    on: Literal['value', 'output']  # what it multiplies
    wide: bool  # one for each dimension of a head, or one for the head
    shared: bool = False  # the same for all heads


GATES = {
    'none': None,
    'elementwise': Kind('x', 'output', wide=True),  # Qiu et al., 2025: G1, and the three below
    'headwise': Kind('x', 'output', wide=False),
    'shared': Kind('x', 'output', wide=True, shared=True),
    'value': Kind('x', 'value', wide=True),  # their G2
    'value_state': Kind('value', 'output', wide=False),  # Bu et al., 2025
}


class Gate(nnx.Module):
    def __init__(self, model: spec.Model, value_width: int, rngs: nnx.Rngs):
        self.kind = kind = GATES[model.gate]
        if kind is None:
            return
        inputs = model.width if kind.of == 'x' else value_width
        heads = 1 if kind.shared else model.heads
        shape = (inputs, heads, value_width if kind.wide else 1)
        axes = ('embed' if kind.of == 'x' else None, None if kind.shared else 'heads', None)
        std = INITIALIZATIONS[model.initialization].linear(model, inputs)
        self.weight_DHK = normal(rngs, shape, std, axes, inputs=1)

    def __call__(self, on: str, given_BTHK: jax.Array, x_BTD: jax.Array, value_BTHK: jax.Array) -> jax.Array:
        """`given` times the gate, if that is what this one multiplies."""
        if self.kind is None or self.kind.on != on:
            return given_BTHK
        if self.kind.of == 'x':
            score_BTHK = product('BTD,DHK->BTHK', x_BTD, self.weight_DHK)
        else:
            score_BTHK = product('BTHD,DHK->BTHK', value_BTHK, self.weight_DHK)
        return given_BTHK * jax.nn.sigmoid(score_BTHK)
