"""FLOPs of a model per token and per training step, from its config: matrix products only."""

import dataclasses
import math

from sinklab.attn.mask import resolve_mask
from sinklab.config import spec
from sinklab.model.attention import COMBINATIONS, count_attended_kv_heads, get_value_width
from sinklab.model.layers import FFN_ACTIVATIONS, GATED_NORM_RANK, NORM_PLACEMENTS, get_gate_shape
from sinklab.model.learned_kv import count_learned_kv

TRAINING_FLOPS_FACTOR = 3  # the backward pass has two products for each one of the forward pass


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of the forward pass per token."""

    projections: float  # queries, keys, values, output, gates and feature maps
    attention: float
    ffn: float
    head: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def count_forward_flops(model: spec.ModelConfig, length: int) -> Flops:
    """Count the FLOPs of the forward pass per token, on windows of `length` tokens.

    Only scores that the mask does not hide are counted: half of them under a causal mask.
    """
    key_width = model.head_width
    value_width = get_value_width(model)
    combination = COMBINATIONS[model.combination]
    num_output_parts = combination.count_outputs(model.heads)
    projection_weights = (
        model.width * (model.heads + model.num_kv_heads) * key_width
        + model.width * model.num_kv_heads * value_width
        + num_output_parts * value_width * model.width
        + math.prod(get_gate_shape(model, value_width))
    )
    if combination.subtracts_heads:
        projection_weights += model.width * num_output_parts
    if model.forget_gate:
        projection_weights += model.width * model.heads
    if model.norm_kind == 'gated_rms':
        placement = NORM_PLACEMENTS[model.norm]
        num_norms = 2 * (placement.before + placement.after + placement.joined)
        projection_weights += num_norms * 2 * model.width * GATED_NORM_RANK
    if model.attention.feature_map == 'mlp':  # two matrices, once for each head that they map
        projection_weights += 2 * (model.heads + count_attended_kv_heads(model)) * key_width**2
    num_keys = sum(  # of all layers, for each query
        model.layer_type_indices.count(index)
        * (compute_mean_visible_keys(layer_type.mask, length) + count_learned_kv(model))
        for index, layer_type in enumerate(model.layer_types)
    )
    return Flops(
        projections=2 * model.layers * projection_weights,
        attention=2 * model.heads * num_keys * (key_width + value_width),
        ffn=2 * model.layers * model.width * model.ffn_width * (3 if FFN_ACTIVATIONS[model.ffn][1] else 2),
        head=2 * model.width * model.vocabulary,
    )


def compute_mean_visible_keys(mask: spec.MaskConfig, length: int) -> float:
    """Return the mean number of text keys that a query sees, with one document for each window."""
    start_T, end_T = resolve_mask(dataclasses.replace(mask, document=False), length, None).bounds_2T
    return float((end_T - start_T).mean())


def count_step_flops(spec: spec.Spec) -> float:
    """Count the FLOPs of one training step."""
    tokens = spec.optimizer.batch_size * spec.data.length
    return TRAINING_FLOPS_FACTOR * tokens * count_forward_flops(spec.model, spec.data.length).total
