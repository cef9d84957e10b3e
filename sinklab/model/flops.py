"""FLOPs of a model per token and per training step, from its config: matrix products only."""

import dataclasses

from sinklab.attn.mask import resolve_mask
from sinklab.config import spec
from sinklab.model.attention import COMBINATIONS, get_value_width
from sinklab.model.layers import FFN_ACTIVATIONS, GATES
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


def count_forward_flops(model: spec.ModelConfig, length: int, uses_mask: bool = True) -> Flops:
    """Count the FLOPs of the forward pass per token.

    Args:
        model: Config of the model.
        length: Number of tokens of a window.
        uses_mask: Count only scores that the mask does not hide (half of them under a causal mask).
    """
    width, heads, kv_heads, key_width = model.width, model.heads, model.num_kv_heads, model.head_width
    value_width = get_value_width(model)
    projection_weights = width * (heads * key_width + kv_heads * (key_width + value_width)) + count_output_weights(
        model
    )
    projection_weights += count_gate_weights(model, value_width) + (
        4 * heads * key_width * key_width if model.attention.feature_map == 'mlp' else 0
    )
    num_keys = sum(  # of all layers, for each query
        model.layer_type_indices.count(index)
        * ((compute_mean_visible_keys(layer_type.mask, length) if uses_mask else length) + count_learned_kv(model))
        for index, layer_type in enumerate(model.layer_types)
    )
    return Flops(
        projections=2 * model.layers * projection_weights,
        attention=2 * heads * num_keys * (key_width + value_width),
        ffn=2 * model.layers * width * model.ffn_width * (3 if FFN_ACTIVATIONS[model.ffn][1] else 2),
        head=2 * width * model.vocabulary,
    )


def count_recompute_flops(model: spec.ModelConfig, length: int, remat: str) -> float:
    """Count the FLOPs of the forward pass per token that the backward pass repeats under --remat."""
    forward_flops = count_forward_flops(model, length)
    ffn_output = (
        2 * model.layers * model.width * model.ffn_width
    )  # not repeated: the backward pass does not read its result
    middle = 2 * model.layers * count_output_weights(model)
    parts = {'attention': forward_flops.attention, 'qkv': forward_flops.projections - middle, 'middle': middle}
    parts['ffn'] = forward_flops.ffn - ffn_output
    return sum(part for name, part in parts.items() if name not in spec.parse_saved_activations(remat))


def count_output_weights(model: spec.ModelConfig) -> int:
    """Count the entries of W_O."""
    num_parts = 1 if COMBINATIONS[model.combination].sums_heads else model.heads
    return num_parts * get_value_width(model) * model.width


def count_gate_weights(model: spec.ModelConfig, value_width: int) -> int:
    gate_kind = GATES[model.gate]
    if gate_kind is None:
        return 0
    num_inputs = model.width if gate_kind.input == 'x' else value_width
    return (
        num_inputs
        * (1 if gate_kind.is_shared and gate_kind.input == 'x' else model.heads)
        * (value_width if gate_kind.is_wide else 1)
    )


def compute_mean_visible_keys(mask: spec.MaskConfig, length: int) -> float:
    """Return the mean number of text keys that a query sees, with one document for each window."""
    start_T, end_T = resolve_mask(dataclasses.replace(mask, document=False), length, None).bounds_2T
    return float((end_T - start_T).mean())


def count_step_flops(spec: spec.Spec) -> float:
    """Count the FLOPs of one training step."""
    tokens = spec.optimizer.batch_size * spec.data.length
    return TRAINING_FLOPS_FACTOR * tokens * count_forward_flops(spec.model, spec.data.length).total
