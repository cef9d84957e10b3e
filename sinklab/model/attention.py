import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import spec
from sinklab.attend.backends import BACKENDS
from sinklab.attend.dense import repeat_kv
from sinklab.attend.received import RowFunctions, compute_key_mass, compute_row_means
from sinklab.attend.rule import AttentionSpec
from sinklab.model.capture import Intermediates
from sinklab.model.columns import LEARNED_KV_KINDS
from sinklab.model.feature_map import FEATURE_MAPS
from sinklab.model.gate import Gate
from sinklab.model.initialization import INITIALIZATIONS, make_normal_param
from sinklab.model.norm import Identity, make_norm
from sinklab.model.parameter import param_einsum, broadcast_and_cast
from jax.ad_checkpoint import checkpoint_name
from sinklab.sharding import constrain_sharding


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What all layers share: who sees whom, and from where; what computes it, and what is wanted of it."""

    spec: AttentionSpec
    rotate: Callable[[jax.Array], jax.Array]
    backend: str  # of BACKENDS
    capture: bool  # the matrix, which the definition alone has
    num_first_keys: int  # the mass on so many first keys
    row_functions: RowFunctions  # means of what is read of whole rows

    def attend_heads(self, layer: 'SelfAttention', query_BTHK, key_BTHK, value_BTHK) -> tuple[jax.Array, Intermediates]:
        """(what each head aggregates, what is wanted of how), of queries and keys that are not rotated yet."""
        query_BTHK, key_BTHK = layer.feature_map(self.rotate(query_BTHK)), self.rotate(key_BTHK)
        key_BSHK, value_BSHK = layer.columns.attach(key_BTHK, value_BTHK)
        arrays = (checkpoint_name(array, 'qkv') for array in (query_BTHK, layer.feature_map(key_BSHK), value_BSHK))
        return layer.attend(*arrays, self)


@dataclasses.dataclass(frozen=True)
class Combination:
    """How heads become one vector: each through its own part of W_O, or their sum through all of it."""

    sums_heads: bool
    has_wide_values: bool = False  # values as wide as the model


COMBINATIONS = {
    'concatenate': Combination(sums_heads=False),
    'add': Combination(sums_heads=True),
    'add_wide': Combination(sums_heads=True, has_wide_values=True),
}


class ProjectionBias(nnx.Module):
    """A learned vector, added."""

    def __init__(self, shape: tuple[int, int], head_axis: str):
        self.vector_HK = nnx.Param(jnp.zeros(shape), axes=(head_axis, 'head_width'), inputs=None)

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        return x_BTHK + broadcast_and_cast(self.vector_HK[...], x_BTHK.shape, x_BTHK.dtype)


def make_projection_bias(model: spec.ModelConfig, num_heads: int, width: int, head_axis: str) -> ProjectionBias | Identity:
    return ProjectionBias((num_heads, width), head_axis) if model.qkv_bias else Identity()


class SelfAttention(nnx.Module):
    """x -> sum over heads of attend(x W_Q, x W_K, x W_V) W_O; H of keys and values may be fewer than of queries."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        init, width = INITIALIZATIONS[model.initialization], model.head_width
        self.combination = COMBINATIONS[model.combination]
        value_width = model.width if self.combination.has_wide_values else width
        kv_axis, std = 'kv_heads' if model.kv_heads else 'heads', init.linear(model, model.width)
        query_axes, kv_axes = (('embed', name, 'head_width') for name in ('heads', kv_axis))
        self.query_DHK = make_normal_param(rngs, (model.width, model.heads, width), std, query_axes, inputs=1)
        self.key_DHK = make_normal_param(rngs, (model.width, model.num_kv_heads, width), std, kv_axes, inputs=1)
        self.value_DHK = make_normal_param(rngs, (model.width, model.num_kv_heads, value_width), std, kv_axes, inputs=1)
        self.query_bias = make_projection_bias(model, model.heads, width, 'heads')
        self.key_bias = make_projection_bias(model, model.num_kv_heads, width, kv_axis)
        self.value_bias = make_projection_bias(model, model.num_kv_heads, value_width, kv_axis)
        num_output_heads, axis = (1, None) if self.combination.sums_heads else (model.heads, 'heads')
        std = init.attention_output(model, num_output_heads * value_width)
        output_args = (num_output_heads, value_width, model.width), std, (axis, 'head_width', 'embed')
        self.output_HKD = make_normal_param(rngs, *output_args, inputs=2)
        self.query_norm, self.key_norm = make_norm(model.qk_norm, model, width), make_norm(model.qk_norm, model, width)
        self.feature_map = FEATURE_MAPS[model.attention.feature_map](model, rngs)
        self.columns = LEARNED_KV_KINDS[model.columns.kind](model, value_width, rngs)
        self.head_norm = make_norm(model.head_norm, model, value_width)
        self.gate = Gate(model, value_width, rngs)

    def __call__(self, x_BTD: jax.Array, context: AttentionContext) -> tuple[jax.Array, Intermediates]:
        query_BTHK, key_BTGK, value_BTGK = (
            constrain_sharding(projection_bias(param_einsum('BTD,DHK->BTHK', x_BTD, weight)), 'batch', None, 'heads', None)
            for weight, projection_bias in (
                (self.query_DHK, self.query_bias),
                (self.key_DHK, self.key_bias),
                (self.value_DHK, self.value_bias),
            )
        )
        key_BTHK, value_BTHK = (
            repeat_kv(array, query_BTHK.shape[2]) for array in (self.key_norm(key_BTGK), value_BTGK)
        )
        gated_BTHK = self.gate('value', value_BTHK, x_BTD, value_BTHK)
        head_BTHK, intermediates = context.attend_heads(self, self.query_norm(query_BTHK), key_BTHK, gated_BTHK)
        head_BTHK = self.head_norm(self.columns.add(head_BTHK))
        head_BTHK = self.gate('output', head_BTHK, x_BTD, value_BTHK)
        return self.combine(head_BTHK), intermediates

    def attend(self, query_BTHK, key_BSHK, value_BSHK, context: AttentionContext) -> tuple[jax.Array, Intermediates]:
        """The same, of all that a query is given to see."""
        bias = dataclasses.replace(context.spec.bias, column_HC=self.columns.score_HC())
        attention_spec, needs_mass = dataclasses.replace(context.spec, bias=bias), context.num_first_keys > 0
        output = BACKENDS[context.backend].attend(query_BTHK, key_BSHK, value_BSHK, attention_spec, needs_mass)
        if context.capture:
            return output.output_BTHK, Intermediates(
                output.attention_BHTS, query_BTHK, key_BSHK, value_BSHK, output.output_BTHK
            )
        row_args, num_sink_tokens = (query_BTHK, key_BSHK, output.row_stats, attention_spec), self.columns.token.count
        key_mass = compute_key_mass(*row_args, context.num_first_keys, num_sink_tokens) if context.num_first_keys else None
        means = compute_row_means(*row_args, context.row_functions, num_sink_tokens) if context.row_functions else None
        return output.output_BTHK, Intermediates(key_mass=key_mass, row_means=means)

    def combine(self, head_BTHK: jax.Array) -> jax.Array:
        if self.combination.sums_heads:
            head_BTHK = head_BTHK.sum(2, keepdims=True)
        return param_einsum('BTHK,HKD->BTD', head_BTHK, self.output_HKD)
