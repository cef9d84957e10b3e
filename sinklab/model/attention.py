"""Self-attention layer, its attention spec, and the intermediates that it returns."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from sinklab.attn.backends import BACKENDS
from sinklab.attn.key_attention_sums import KeyAttentionSums, compute_key_attention_sums
from sinklab.attn.mask import Mask, resolve_mask
from sinklab.attn.operations import resolve_operation
from sinklab.attn.reference import AttentionOutput, repeat_kv, sum_values
from sinklab.attn.spec import (
    AttentionProblem,
    AttentionSpec,
    RelativePositionBias,
    ScoreBias,
)
from sinklab.config import spec
from sinklab.model.layers import (
    FEATURE_MAPS,
    GATES,
    INITIALIZATIONS,
    Exclusion,
    Gate,
    Identity,
    make_head_norm,
    make_normal_param,
)
from sinklab.model.learned_kv import LEARNED_KV_KINDS, LearnedKV
from sinklab.model.positions import POSITIONS, ForgetGate
from sinklab.parallel.param_einsum import broadcast_and_cast, param_einsum
from sinklab.parallel.sharding import constrain_sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intermediates:
    """Intermediates of attention layers; arrays that were not requested are None."""

    attention_BHTS: jax.Array | None = None  # float32, rows not divided by their sums; S: learned keys, then text
    query_BTHK: jax.Array | None = None  # as multiplied by the keys
    key_BSHK: jax.Array | None = None  # as multiplied by the queries; S as above
    value_BSHK: jax.Array | None = None
    head_BTHK: jax.Array | None = None  # sum_j A_ij v_j, before V bias, head norm and gate
    gate_BTH: jax.Array | None = None  # mean over dimensions of the gate, float32
    normed_BTD: jax.Array | None = None  # input of attention: the residual stream after the norm
    ffn_BTD: jax.Array | None = None  # what the FFN adds to the residual stream
    residual_BTD: jax.Array | None = None  # residual stream after the block, before a `joined` norm
    sink_BCD: jax.Array | None = None  # residual stream of sink tokens
    key_attention_sums: KeyAttentionSums | None = None  # on learned keys and first keys, from the queries of the text

    def slice_text(self, num_dropped: int) -> 'Intermediates':
        """Drop the first `num_dropped` queries, which are sink tokens and not text."""
        axes = dict.fromkeys(('normed_BTD', 'ffn_BTD', 'residual_BTD', 'gate_BTH', 'attention_BHTS'), -2)
        axes |= dict(query_BTHK=-3, head_BTHK=-3)
        sliced = {
            name: jax.lax.slice_in_dim(getattr(self, name), num_dropped, None, axis=axis)
            for name, axis in axes.items()
            if getattr(self, name) is not None
        }
        if self.residual_BTD is not None and num_dropped:
            sliced['sink_BCD'] = self.residual_BTD[..., :num_dropped, :]
        return dataclasses.replace(self, **sliced)


def make_attention_spec(
    model: spec.ModelConfig, length: int, relative: RelativePositionBias | None, position_BT: jax.Array, mask: Mask
) -> AttentionSpec:
    """Make the attention spec of a model that is trained on windows of `length` tokens.

    `position_BT` and `mask` are those of the text, without a sink token.
    """
    learned_kv = LEARNED_KV_KINDS[model.learned_kv.kind]
    query_BTH = learned_kv.tokens_class.shift_positions(position_BT)[..., None]
    xp = np if isinstance(query_BTH, np.ndarray) else jnp
    key_BSH = xp.pad(query_BTH, ((0, 0), (learned_kv.num_keys - learned_kv.tokens_class.num_tokens, 0), (0, 0)))
    mask = mask.pad(before=learned_kv.tokens_class.num_tokens)
    return AttentionSpec(
        resolve_operation(model.attention, length), mask, learned_kv.num_keys, ScoreBias(relative, query_BTH, key_BSH)
    )


NUM_CHECKED_TOKENS = 4096  # every kernel has several blocks at this length, including interior ones
NUM_CHECKED_HEADS = 2


def make_attention_problem(model: spec.ModelConfig, length: int) -> AttentionProblem:
    """Make the attention problem of one of `model.layer_types` on `length` tokens, to select a backend for it.

    A document mask is represented by that of three documents. The problem has a smaller one for the verification of
    backends, with fewer tokens and with two heads, which share their keys if some heads of the model do.
    """
    learned_kv = LEARNED_KV_KINDS[model.learned_kv.kind]
    third = length // 3 + 1
    document_BT = jnp.arange(length)[None] // third * third if model.mask.document else None
    relative = (
        ForgetGate.relative_bias
        if model.forget_gate
        else POSITIONS[model.position](model, 1, nnx.Rngs(0)).make_relative_bias()
    )
    attention_spec = make_attention_spec(
        model, length, relative, np.arange(length)[None], resolve_mask(model.mask, length, document_BT)
    )
    if learned_kv.num_keys > learned_kv.tokens_class.num_tokens:
        attention_spec = dataclasses.replace(
            attention_spec, bias=dataclasses.replace(attention_spec.bias, learned_HC=jnp.zeros((1, 1)))
        )
    widths = (model.head_width, get_value_width(model))
    kv_heads = count_attended_kv_heads(model)
    smaller = None
    if length > NUM_CHECKED_TOKENS or model.heads > NUM_CHECKED_HEADS:
        smaller_model = dataclasses.replace(
            model, heads=NUM_CHECKED_HEADS, kv_heads=1 if kv_heads < model.heads else None
        )
        smaller = make_attention_problem(smaller_model, min(length, NUM_CHECKED_TOKENS))
    return AttentionProblem(attention_spec, model.heads, *widths, model.dtype, kv_heads, smaller)


def count_attended_kv_heads(model: spec.ModelConfig) -> int:
    """Return the number of heads of the keys and values that attention receives.

    These are the heads of the key and value projections, unless each query head has keys or values of its own:
    learned keys, or values that a gate reads or multiplies.
    """
    learned_kv = LEARNED_KV_KINDS[model.learned_kv.kind]
    gate = GATES[model.gate]
    has_learned_keys = learned_kv.num_keys > learned_kv.tokens_class.num_tokens
    has_gated_values = gate is not None and 'value' in (gate.input, gate.target)
    return model.heads if has_learned_keys or has_gated_values else model.num_kv_heads


# Replaces values of one layer: (target, array_BSHX, entries of S before the text, visible_BSHX) -> array_BSHX. The
# targets and axes are those of sinklab.analysis.edits.
EditFn = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Inputs that all layers share: attention spec, backend, and which intermediates to return."""

    spec: AttentionSpec
    rotate: Callable[[jax.Array], jax.Array]
    backend: str  # name in BACKENDS
    capture: bool  # return attention matrices, from the `dense` backend
    num_first_keys: int  # return the attention to this many first keys
    edit: EditFn | None = None  # of one layer; with `capture` only

    def add_edit(self, edit: Callable[..., jax.Array], layer: jax.Array) -> 'AttentionContext':
        """Return the context of one layer, with its edit.

        Args:
            edit: Function (layer, *arguments of an `EditFn`), as `Transformer.compute_hidden` takes it.
            layer: Index of the layer.
        """
        return dataclasses.replace(self, edit=functools.partial(edit, layer))

    def attend(
        self,
        query_BTHK,
        key_BTGK,
        value_BTGK,
        feature_map: nnx.Module,
        learned_kv: LearnedKV,
        forget_position_BTH: jax.Array | None,
    ) -> tuple[jax.Array, Intermediates]:
        """Attend with the queries of a layer to its learned keys and to its keys of the text.

        Args:
            query_BTHK: Queries, before rotation and feature map.
            key_BTGK: Keys of the text, likewise. Each of the G key heads serves H / G query heads.
            value_BTGK: Values of the text.
            feature_map: The feature map of the layer, which is applied to queries and keys.
            learned_kv: The learned keys, values and key biases of the layer.
            forget_position_BTH: Positions of a `ForgetGate`, or None.

        Returns:
            The outputs of the heads, head_BTHK, and the requested `Intermediates`.
        """
        query_BTHK = feature_map(self.rotate(query_BTHK))
        key_BTGK = self.rotate(key_BTGK)
        key_BSGK, value_BSGK = learned_kv.prepend(key_BTGK, value_BTGK)
        query_BTHK, key_BSGK, value_BSGK = (
            checkpoint_name(array, 'qkv') for array in (query_BTHK, feature_map(key_BSGK), value_BSGK)
        )
        num_sink_tokens = learned_kv.tokens_class.num_tokens
        if self.edit is not None:  # single heads of a group can be edited
            key_BSGK, value_BSGK = (
                self.edit(target, repeat_kv(array, query_BTHK.shape[2]), self.spec.num_learned_kv)
                for target, array in (('key', key_BSGK), ('value', value_BSGK))
            )
            query_BTHK = self.edit('query', query_BTHK, num_sink_tokens)
        bias = dataclasses.replace(self.spec.bias, learned_HC=learned_kv.get_score_bias_HC())
        if forget_position_BTH is not None:
            num_unforgotten = key_BSGK.shape[1] - key_BTGK.shape[1]
            position_BSH = jnp.pad(forget_position_BTH, ((0, 0), (num_unforgotten, 0), (0, 0)))
            bias = ScoreBias(ForgetGate.relative_bias, forget_position_BTH, position_BSH, bias.learned_HC)
        attention_spec = dataclasses.replace(self.spec, bias=bias, needs_abs_weight_sum=self.num_first_keys > 0)
        output = BACKENDS[self.backend].attend(query_BTHK, key_BSGK, value_BSGK, attention_spec)
        if self.edit is not None:
            output = edit_weights(output, value_BSGK, attention_spec, self.edit)
            output = output._replace(output_BTHK=self.edit('head', output.output_BTHK, num_sink_tokens))
        if self.capture:
            key_BSHK, value_BSHK = (repeat_kv(array, query_BTHK.shape[2]) for array in (key_BSGK, value_BSGK))
            return output.output_BTHK, Intermediates(
                output.attention_BHTS, query_BTHK, key_BSHK, value_BSHK, output.output_BTHK
            )
        if not self.num_first_keys:
            return output.output_BTHK, Intermediates()
        key_attention_sums = compute_key_attention_sums(
            query_BTHK, key_BSGK, output.row_stats, attention_spec, self.num_first_keys, num_sink_tokens
        )
        return output.output_BTHK, Intermediates(key_attention_sums=key_attention_sums)


def edit_weights(
    output: AttentionOutput, value_BSHK: jax.Array, spec: AttentionSpec, edit: EditFn
) -> AttentionOutput:
    """Edit the attention weights, and compute the output again from them."""
    visible_BHTS = spec.materialize_mask(value_BSHK.shape[1] - spec.num_learned_kv)
    attention_BSHT, visible_BSHT = (
        jnp.transpose(array, (0, 3, 1, 2)) for array in (output.attention_BHTS, visible_BHTS)
    )
    attention_BSHT = edit('attention', attention_BSHT, spec.num_learned_kv, visible_BSHT)
    attention_BHTS = jnp.transpose(attention_BSHT, (0, 2, 3, 1))
    return output._replace(output_BTHK=sum_values(attention_BHTS, value_BSHK), attention_BHTS=attention_BHTS)


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """The contexts of all layer types (`ModelConfig.layer_types`), and the type of one layer of the scan over layers.

    The mask of each type is static, as kernels need it. Only attention is in the branches of the conditional over
    types, because the backward pass keeps the residuals of every branch.
    """

    contexts: Sequence[Any]  # an AttentionContext or a StreamingContext for each layer type
    type_index: jax.Array | None  # index of the type of this layer in `contexts`; None if there is only one type
    first_value_BTGK: jax.Array | None = None  # of the first layer, for a value residual

    @property
    def capture(self) -> bool:
        return self.contexts[0].capture

    @property
    def edit(self) -> EditFn | None:
        return self.contexts[0].edit

    def attend(self, *args: Any) -> tuple[jax.Array, Any]:
        """Attend as `AttentionContext.attend` does."""
        if self.type_index is None:
            return self.contexts[0].attend(*args)
        return jax.lax.switch(self.type_index, [context.attend for context in self.contexts], *args)


def make_layer_type_indices(model: spec.ModelConfig) -> jax.Array | None:
    """Return the index of the type of each layer as an input of a scan over layers; None if all layers are alike."""
    return jnp.array(model.layer_type_indices) if len(model.layer_types) > 1 else None


@dataclasses.dataclass(frozen=True)
class Combination:
    """How heads are combined: each through its own part of W_O, or their sum through all of W_O."""

    sums_heads: bool = False
    has_model_width_values: bool = False  # values have the width of the model
    subtracts_heads: bool = False  # head 2i + 1 is subtracted from head 2i

    def count_outputs(self, heads: int) -> int:
        return 1 if self.sums_heads else heads // 2 if self.subtracts_heads else heads


COMBINATIONS = {
    'concatenate': Combination(),
    'add': Combination(sums_heads=True),
    'add_wide': Combination(sums_heads=True, has_model_width_values=True),
    'differential': Combination(subtracts_heads=True),  # version 2 of the Differential Transformer (Ye et al., 2026)
}


def get_value_width(model: spec.ModelConfig) -> int:
    """Return the width of the values of a head."""
    return model.width if COMBINATIONS[model.combination].has_model_width_values else model.head_width


class ProjectionBias(nnx.Module):
    """Bias of a projection: a learned vector that is added."""

    def __init__(self, shape: tuple[int, int], head_axis: str):
        self.vector_HK = nnx.Param(jnp.zeros(shape), axes=(head_axis, 'head_width'), inputs=None)

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        return x_BTHK + broadcast_and_cast(self.vector_HK[...], x_BTHK.shape, x_BTHK.dtype)


def make_projection_bias(
    model: spec.ModelConfig, num_heads: int, width: int, head_axis: str
) -> ProjectionBias | Identity:
    return ProjectionBias((num_heads, width), head_axis) if model.qkv_bias else Identity()


def project(x_BTD: jax.Array, weight_DHK: nnx.Param, bias: ProjectionBias | Identity) -> jax.Array:
    return constrain_sharding(bias(param_einsum('BTD,DHK->BTHK', x_BTD, weight_DHK)), 'batch', None, 'heads', None)


class SelfAttention(nnx.Module):
    """Self-attention layer: sum over heads of attend(x W_Q, x W_K, x W_V) W_O.

    Keys and values may have fewer heads than queries (grouped-query attention).
    """

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        init = INITIALIZATIONS[model.initialization]
        width = model.head_width
        self.combination = COMBINATIONS[model.combination]
        value_width = get_value_width(model)
        kv_axis = 'kv_heads' if model.kv_heads else 'heads'
        std = init.linear(model, model.width)
        query_axes, kv_axes = (('embed', name, 'head_width') for name in ('heads', kv_axis))
        self.query_DHK = make_normal_param(rngs, (model.width, model.heads, width), std, query_axes, inputs=1)
        self.key_DHK = make_normal_param(rngs, (model.width, model.num_kv_heads, width), std, kv_axes, inputs=1)
        self.value_DHK = make_normal_param(
            rngs, (model.width, model.num_kv_heads, value_width), std, kv_axes, inputs=1
        )
        self.query_bias = make_projection_bias(model, model.heads, width, 'heads')
        self.key_bias = make_projection_bias(model, model.num_kv_heads, width, kv_axis)
        self.value_bias = make_projection_bias(model, model.num_kv_heads, value_width, kv_axis)
        num_output_heads = self.combination.count_outputs(model.heads)
        axis = None if self.combination.sums_heads else 'heads'
        if self.combination.subtracts_heads:
            shape = (model.width, num_output_heads, 1)
            self.lambda_DHK = make_normal_param(rngs, shape, std, ('embed', axis, None), inputs=1)
        std = init.attention_output(model, num_output_heads * value_width)
        output_args = (num_output_heads, value_width, model.width), std, (axis, 'head_width', 'embed')
        self.output_HKD = make_normal_param(rngs, *output_args, inputs=2)
        self.query_norm = make_head_norm(model.qk_norm, model, width)
        self.key_norm = make_head_norm(model.qk_norm, model, width)
        self.feature_map = FEATURE_MAPS[model.attention.feature_map](model, rngs)
        self.learned_kv = LEARNED_KV_KINDS[model.learned_kv.kind](model, value_width, rngs)
        self.num_attended_kv_heads = count_attended_kv_heads(model)
        self.exclusion = Exclusion(model)
        self.forget_gate = ForgetGate(model, rngs) if model.forget_gate else None
        self.head_norm = make_head_norm(model.head_norm, model, value_width)
        self.gate = Gate(model, value_width, rngs)

    def __call__(self, x_BTD: jax.Array, context: LayerContext) -> tuple[jax.Array, Intermediates]:
        query_BTHK = project(x_BTD, self.query_DHK, self.query_bias)
        key_BTGK = project(x_BTD, self.key_DHK, self.key_bias)
        value_BTGK = self.project_values(x_BTD)
        if context.first_value_BTGK is not None:
            value_BTGK = (value_BTGK + context.first_value_BTGK) / 2
        key_BTGK, value_BTGK = (
            repeat_kv(array, self.num_attended_kv_heads) for array in (self.key_norm(key_BTGK), value_BTGK)
        )
        gated_BTGK = self.gate('value', value_BTGK, x_BTD, value_BTGK)
        forget_position_BTH = None if self.forget_gate is None else self.forget_gate.compute_positions(x_BTD)
        head_BTHK, intermediates = context.attend(
            self.query_norm(query_BTHK), key_BTGK, gated_BTGK, self.feature_map, self.learned_kv, forget_position_BTH
        )
        head_BTHK = self.exclusion(head_BTHK, repeat_kv(gated_BTGK, head_BTHK.shape[2]))
        head_BTHK = self.head_norm(self.learned_kv.add_value(head_BTHK))
        head_BTHK = self.gate('output', head_BTHK, x_BTD, value_BTGK)
        if context.capture and self.gate.kind is not None:
            gate_BTH = self.gate.compute(x_BTD, value_BTGK).mean(-1, dtype=jnp.float32)
            intermediates = dataclasses.replace(intermediates, gate_BTH=gate_BTH)
        return self.combine(head_BTHK, x_BTD), intermediates

    def project_values(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.value_DHK, self.value_bias)

    def combine(self, head_BTHK: jax.Array, x_BTD: jax.Array) -> jax.Array:
        if self.combination.sums_heads:
            head_BTHK = head_BTHK.sum(2, keepdims=True)
        if self.combination.subtracts_heads:
            gate_BTHK = jax.nn.sigmoid(param_einsum('BTD,DHK->BTHK', x_BTD, self.lambda_DHK))
            head_BTHK = head_BTHK[:, :, 0::2] - gate_BTHK * head_BTHK[:, :, 1::2]
        return param_einsum('BTHK,HKD->BTD', head_BTHK, self.output_HKD)
