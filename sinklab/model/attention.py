import dataclasses
from collections.abc import Callable

import jax
from flax import nnx

from sinklab import spec
from sinklab.attend import columns_mass, dense, fused
from sinklab.attend.bias import Bias
from sinklab.attend.mask import Mask
from sinklab.model.capture import Capture
from sinklab.model.columns import COLUMNS
from sinklab.model.feature_map import FEATURE_MAPS
from sinklab.model.gate import Gate
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.norm import norm
from sinklab.model.parameter import product
from sinklab.model.positions import POSITIONS
from sinklab.sharding import place


@dataclasses.dataclass(frozen=True)
class View:
    """What all layers share: who sees whom, and from where; what computes it, and what is wanted of it."""

    mask: Mask
    rotate: Callable[[jax.Array], jax.Array]
    bias: Bias
    backend: str  # of attend.fused
    capture: bool  # the matrix
    keys: int  # the mass on so many first keys


@dataclasses.dataclass(frozen=True)
class Combination:
    """How heads become one vector: each through its own part of W_O, or their sum through all of it."""

    added: bool
    wide: bool = False  # values as wide as the model


COMBINATIONS = {
    'concatenate': Combination(added=False),
    'add': Combination(added=True),
    'add_wide': Combination(added=True, wide=True),
}


class SelfAttention(nnx.Module):
    """x -> sum over heads of attend(x W_Q, x W_K, x W_V) W_O, without biases but those of `columns`."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        self.attention = model.attention
        init, width = INITIALIZATIONS[model.initialization], model.head_width
        self.combination = COMBINATIONS[model.combination]
        value_width = model.width if self.combination.wide else width
        axes, std = ('embed', 'heads', 'head_width'), init.linear(model, model.width)
        self.query_DHK = normal(rngs, (model.width, model.heads, width), std, axes)
        self.key_DHK = normal(rngs, (model.width, model.heads, width), std, axes)
        self.value_DHK = normal(rngs, (model.width, model.heads, value_width), std, axes)
        heads, axis = (1, None) if self.combination.added else (model.heads, 'heads')
        std = init.attention_output(model, heads * value_width)
        self.output_HKD = normal(rngs, (heads, value_width, model.width), std, (axis, 'head_width', 'embed'))
        self.query_norm, self.key_norm = norm(model.qk_norm, model, width), norm(model.qk_norm, model, width)
        self.feature_map = FEATURE_MAPS[model.attention.feature_map](model, rngs)
        self.columns = COLUMNS[model.columns](model, value_width, rngs)
        self.head_norm = norm(model.head_norm, model, value_width)
        self.gate = Gate(model, value_width, rngs)

    def __call__(self, x_BTD: jax.Array, view: View) -> tuple[jax.Array, Capture]:
        query_BTHK, key_BTHK, value_BTHK = (
            place(product('BTD,DHK->BTHK', x_BTD, weight[...]), 'batch', None, 'heads', None)
            for weight in (self.query_DHK, self.key_DHK, self.value_DHK)
        )
        query_BTHK = self.feature_map(view.rotate(self.query_norm(query_BTHK)))
        key_BTHK = view.rotate(self.key_norm(key_BTHK))
        gated_BTHK = self.gate('value', value_BTHK, x_BTD, value_BTHK)
        key_BSHK, value_BSHK = self.columns.attach(key_BTHK, gated_BTHK)
        head_BTHK, captured = self.attend(query_BTHK, self.feature_map(key_BSHK), value_BSHK, view)
        head_BTHK = self.head_norm(self.columns.add(head_BTHK))
        head_BTHK = self.gate('output', head_BTHK, x_BTD, value_BTHK)
        return self.combine(head_BTHK), captured

    def attend(self, query_BTHK, key_BSHK, value_BSHK, view: View) -> tuple[jax.Array, Capture]:
        """(what each head aggregates, what is wanted of how); the matrix is made only to be captured."""
        count, bias = self.columns.count, dataclasses.replace(view.bias, column_HC=self.columns.score_HC())
        arrays, how = (query_BTHK, key_BSHK, value_BSHK), (self.attention, view.mask)
        if view.capture:
            bias_BHTS = bias.matrix(view.bias.query_BT, count, 0, key_BSHK.shape[1] - count)
            head_BTHK, attention_BHTS = dense.attend(*arrays, *how, columns=count, bias_BHTS=bias_BHTS)
            return head_BTHK, Capture(attention_BHTS, key_BSHK, value_BSHK, head_BTHK)
        head_BTHK, rows = fused.attend(view.backend, *arrays, *how, count, bias, view.keys > 0)
        if not view.keys:
            return head_BTHK, Capture()
        received = columns_mass.received(
            query_BTHK, key_BSHK, rows, *how, count, bias, view.keys, first=self.columns.tokens
        )
        return head_BTHK, Capture(received=received)

    def combine(self, head_BTHK: jax.Array) -> jax.Array:
        if self.combination.added:
            head_BTHK = head_BTHK.sum(2, keepdims=True)
        return product('BTHK,HKD->BTD', head_BTHK, self.output_HKD[...])


def case(model: spec.Model, length: int) -> fused.Case:
    """What a model over so many tokens asks of a backend."""
    columns, mask = COLUMNS[model.columns], model.mask
    curve = jax.eval_shape(lambda: POSITIONS[model.position](model, length, nnx.Rngs(0)).curve())
    masks = [name for name in ('prefix', 'window', 'block', 'document') if getattr(mask, name)]
    return fused.Case(
        attention=model.attention,
        length=length + columns.tokens,
        heads=model.heads,
        width=model.head_width,
        value_width=model.width if COMBINATIONS[model.combination].wide else model.head_width,
        dtype=model.dtype,
        columns=columns.count,
        curve=curve is not None,
        elementwise=curve is None or curve.elementwise,
        mask=' and '.join(masks) or 'causal',
    )
