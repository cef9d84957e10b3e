"""Example attention specs: every operation, under every kind of mask, and with ALiBi."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from sinklab.attn import mask as masks
from sinklab.attn.function import make_operation
from sinklab.attn.mask import Mask
from sinklab.attn.operations import Operation
from sinklab.attn.spec import AttentionSpec, RelativePositionBias, ScoreBias
from sinklab.config.spec import NORMALIZERS_BY_SIMILARITY


def make_operations() -> dict[tuple[str, str], Operation]:
    """Make an operation of every similarity with each of its normalizers."""
    return {
        (similarity, normalizer): make_operation(
            similarity, normalizer, power=2.0 if normalizer == 'p_norm' else None
        )
        for similarity, normalizers in NORMALIZERS_BY_SIMILARITY.items()
        for normalizer in normalizers
    }


def make_three_documents_mask(length: int) -> Mask:
    third = length // 3 + 1
    return masks.make_causal_mask(length) & masks.make_document_mask(jnp.arange(length)[None] // third * third)


def make_alibi_bias(heads: int, length: int) -> ScoreBias:
    """Make an ALiBi bias with the same slope for every head."""
    position_BT1 = np.arange(length)[None, :, None]
    return ScoreBias(
        RelativePositionBias(lambda slope, distance: -slope[0] * distance, np.full((heads, 1), 1 / 64)),
        position_BT1,
        position_BT1,
    )


MASKS: dict[str, Callable[[int], Mask]] = {
    'causal': masks.make_causal_mask,
    'prefix': lambda length: masks.make_prefix_mask(length, length // 3),
    'window': lambda length: masks.make_causal_mask(length) & masks.make_window_mask(length, -(-length // 3)),
    'block': lambda length: masks.make_causal_mask(length) & masks.make_block_mask(length, -(-length // 3)),
    'document': make_three_documents_mask,
}


def make_specs(operation: Operation, heads: int, length: int) -> dict[str, AttentionSpec]:
    """Make specs of the operation under each mask, and with ALiBi."""
    specs = {name: AttentionSpec(operation, mask(length)) for name, mask in MASKS.items()} | {
        'alibi': AttentionSpec(operation, masks.make_causal_mask(length), bias=make_alibi_bias(heads, length))
    }
    return {name: dataclasses.replace(spec, needs_abs_weight_sum=True) for name, spec in specs.items()}
