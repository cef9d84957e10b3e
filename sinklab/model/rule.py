"""Who sees whom in a model, and by what operation: the same for all its layers, but for the scores of columns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import spec
from sinklab.attend import examples
from sinklab.attend.bias import ScoreBias, RelativePositionBias
from sinklab.attend.mask import Mask, resolve_mask
from sinklab.attend.operation import resolve_operation
from sinklab.attend.rule import AttentionProblem, AttentionSpec
from sinklab.model.attention import COMBINATIONS
from sinklab.model.columns import LEARNED_KV_KINDS
from sinklab.model.positions import POSITIONS


def make_attention_spec(model: spec.ModelConfig, length: int, relative: RelativePositionBias | None, position_BT: jax.Array, mask: Mask) -> AttentionSpec:
    """Of a model that is trained on windows of `length`; positions and mask are those of the text."""
    learned_kv = LEARNED_KV_KINDS[model.columns.kind]
    query_BT = learned_kv.token.positions(position_BT)
    xp = np if isinstance(query_BT, np.ndarray) else jnp
    key_BS = xp.pad(query_BT, ((0, 0), (learned_kv.count - learned_kv.token.count, 0)))
    mask = mask.pad(before=learned_kv.token.count)
    return AttentionSpec(resolve_operation(model.attention, length), mask, learned_kv.count, ScoreBias(relative, query_BT, key_BS))


def make_attention_problem(model: spec.ModelConfig, length: int) -> AttentionProblem:
    """What a model over so many tokens asks of a backend; its documents, which differ, are three."""
    learned_kv, document_BT = LEARNED_KV_KINDS[model.columns.kind], None
    if model.mask.document:
        document_BT = jnp.asarray(examples.make_document_starts(length))
    relative = POSITIONS[model.position](model, 1, nnx.Rngs(0)).curve()
    attention_spec = make_attention_spec(model, length, relative, np.arange(length)[None], resolve_mask(model.mask, length, document_BT))
    if learned_kv.count > learned_kv.token.count:
        attention_spec = dataclasses.replace(attention_spec, bias=dataclasses.replace(attention_spec.bias, column_HC=jnp.zeros((1, 1))))
    value_width = model.width if COMBINATIONS[model.combination].has_wide_values else model.head_width
    return AttentionProblem(attention_spec, model.heads, model.head_width, value_width, model.dtype)
