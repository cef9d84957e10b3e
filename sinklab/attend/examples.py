"""A rule of each kind, for whoever wants to see a backend at work on all of them."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from sinklab.attend import mask as masks
from sinklab.attend.bias import Bias, Curve
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS
from sinklab.attend.operation import Operation
from sinklab.attend.rule import Rule
from sinklab.attend.similarity import SIMILARITIES
from sinklab.spec import PAIRS


def operations() -> dict[tuple[str, str], Operation]:
    """Every similarity with every normalizer that it goes with."""
    pairs = [(similarity, normalizer) for similarity, normalizers in PAIRS.items() for normalizer in normalizers]
    return {
        (similarity, normalizer): Operation(
            f'{similarity} with {normalizer}',
            SIMILARITIES[similarity],
            NORMALIZERS[normalizer],
            power=2.0 if normalizer == 'p_norm' else None,
        )
        for similarity, normalizer in pairs
    }


def document_starts(length: int) -> np.ndarray:
    """Three documents, as start_BT."""
    place_T = np.arange(length)
    return np.maximum.accumulate(np.where(place_T % (length // 3 + 1) == 0, place_T, 0))[None]


def documents(length: int) -> Mask:
    return masks.causal(length) & masks.document(jnp.asarray(document_starts(length)))


def slope(heads: int, length: int) -> Bias:
    """A score falls with distance."""
    place_BT = np.arange(length)[None]
    return Bias(Curve(lambda slope, distance: -slope[0] * distance, np.full((heads, 1), 1 / 64)), place_BT, place_BT)


MASKS: dict[str, Callable[[int], Mask]] = {
    'causal': masks.causal,
    'prefix': lambda length: masks.prefix(length, length // 3),
    'window': lambda length: masks.causal(length) & masks.window(length, -(-length // 3)),
    'block': lambda length: masks.causal(length) & masks.block(length, -(-length // 3)),
    'document': documents,
}


def rules(operation: Operation, heads: int, length: int) -> dict[str, Rule]:
    """The operation under each mask, and with a curve."""
    found = {name: Rule(operation, mask(length)) for name, mask in MASKS.items()}
    return found | {'alibi': Rule(operation, masks.causal(length), bias=slope(heads, length))}
