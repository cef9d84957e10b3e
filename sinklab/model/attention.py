import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import spec
from sinklab.attend.backends import BACKENDS
from sinklab.attend.dense import per_query_head
from sinklab.attend.received import Values, of_first_keys, row_means
from sinklab.attend.rule import Rule
from sinklab.model.capture import Capture
from sinklab.model.columns import COLUMNS
from sinklab.model.feature_map import FEATURE_MAPS
from sinklab.model.gate import Gate
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.norm import Nothing, norm
from sinklab.model.parameter import product, spread
from sinklab.model.remat import kept
from sinklab.sharding import place


@dataclasses.dataclass(frozen=True)
class View:
    """What all layers share: who sees whom, and from where; what computes it, and what is wanted of it."""

    rule: Rule
    rotate: Callable[[jax.Array], jax.Array]
    backend: str  # of BACKENDS
    capture: bool  # the matrix, which the definition alone has
    keys: int  # the mass on so many first keys
    rows: Values  # means of what is read of whole rows

    def heads(self, layer: 'SelfAttention', query_BTHK, key_BTHK, value_BTHK) -> tuple[jax.Array, Capture]:
        """(what each head aggregates, what is wanted of how), of queries and keys that are not rotated yet."""
        query_BTHK, key_BTHK = layer.feature_map(self.rotate(query_BTHK)), self.rotate(key_BTHK)
        key_BSHK, value_BSHK = layer.columns.attach(key_BTHK, value_BTHK)
        given = (kept(array, 'qkv') for array in (query_BTHK, layer.feature_map(key_BSHK), value_BSHK))
        return layer.attend(*given, self)


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


class Bias(nnx.Module):
    """A learned vector, added."""

    def __init__(self, shape: tuple[int, int], heads: str):
        self.vector_HK = nnx.Param(jnp.zeros(shape), axes=(heads, 'head_width'), inputs=None)

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        return x_BTHK + spread(self.vector_HK[...], x_BTHK.shape, x_BTHK.dtype)


def bias(model: spec.Model, heads: int, width: int, axis: str) -> Bias | Nothing:
    return Bias((heads, width), axis) if model.qkv_bias else Nothing()


class SelfAttention(nnx.Module):
    """x -> sum over heads of attend(x W_Q, x W_K, x W_V) W_O; H of keys and values may be fewer than of queries."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        init, width = INITIALIZATIONS[model.initialization], model.head_width
        self.combination = COMBINATIONS[model.combination]
        value_width = model.width if self.combination.wide else width
        group, std = 'kv_heads' if model.kv_heads else 'heads', init.linear(model, model.width)
        of_query, axes = (('embed', name, 'head_width') for name in ('heads', group))
        self.query_DHK = normal(rngs, (model.width, model.heads, width), std, of_query, inputs=1)
        self.key_DHK = normal(rngs, (model.width, model.groups, width), std, axes, inputs=1)
        self.value_DHK = normal(rngs, (model.width, model.groups, value_width), std, axes, inputs=1)
        self.query_bias = bias(model, model.heads, width, 'heads')
        self.key_bias = bias(model, model.groups, width, group)
        self.value_bias = bias(model, model.groups, value_width, group)
        heads, axis = (1, None) if self.combination.added else (model.heads, 'heads')
        std = init.attention_output(model, heads * value_width)
        outward = (heads, value_width, model.width), std, (axis, 'head_width', 'embed')
        self.output_HKD = normal(rngs, *outward, inputs=2)
        self.query_norm, self.key_norm = norm(model.qk_norm, model, width), norm(model.qk_norm, model, width)
        self.feature_map = FEATURE_MAPS[model.attention.feature_map](model, rngs)
        self.columns = COLUMNS[model.columns.kind](model, value_width, rngs)
        self.head_norm = norm(model.head_norm, model, value_width)
        self.gate = Gate(model, value_width, rngs)

    def __call__(self, x_BTD: jax.Array, view: View) -> tuple[jax.Array, Capture]:
        query_BTHK, key_BTGK, value_BTGK = (
            place(added(product('BTD,DHK->BTHK', x_BTD, weight)), 'batch', None, 'heads', None)
            for weight, added in (
                (self.query_DHK, self.query_bias),
                (self.key_DHK, self.key_bias),
                (self.value_DHK, self.value_bias),
            )
        )
        key_BTHK, value_BTHK = (
            per_query_head(array, query_BTHK.shape[2]) for array in (self.key_norm(key_BTGK), value_BTGK)
        )
        gated_BTHK = self.gate('value', value_BTHK, x_BTD, value_BTHK)
        head_BTHK, captured = view.heads(self, self.query_norm(query_BTHK), key_BTHK, gated_BTHK)
        head_BTHK = self.head_norm(self.columns.add(head_BTHK))
        head_BTHK = self.gate('output', head_BTHK, x_BTD, value_BTHK)
        return self.combine(head_BTHK), captured

    def attend(self, query_BTHK, key_BSHK, value_BSHK, view: View) -> tuple[jax.Array, Capture]:
        """The same, of all that a query is given to see."""
        bias = dataclasses.replace(view.rule.bias, column_HC=self.columns.score_HC())
        rule, measured = dataclasses.replace(view.rule, bias=bias), view.keys > 0
        found = BACKENDS[view.backend].attend(query_BTHK, key_BSHK, value_BSHK, rule, measured)
        if view.capture:
            return found.output_BTHK, Capture(
                found.attention_BHTS, query_BTHK, key_BSHK, value_BSHK, found.output_BTHK
            )
        of_rows, first = (query_BTHK, key_BSHK, found.rows, rule), self.columns.token.count
        first_keys = of_first_keys(*of_rows, view.keys, first) if view.keys else None
        means = row_means(*of_rows, view.rows, first) if view.rows else None
        return found.output_BTHK, Capture(received=first_keys, row_means=means)

    def combine(self, head_BTHK: jax.Array) -> jax.Array:
        if self.combination.added:
            head_BTHK = head_BTHK.sum(2, keepdims=True)
        return product('BTHK,HKD->BTD', head_BTHK, self.output_HKD)
