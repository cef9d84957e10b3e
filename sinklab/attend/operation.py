"""An operation: how much each query gives each key, as a function of their scores."""

import dataclasses
import math

import jax

from sinklab import spec
from sinklab.attend.normalizer import NORMALIZERS, Normalizer
from sinklab.attend.similarity import SIMILARITIES, Similarity


@dataclasses.dataclass(frozen=True)
class Operation:
    """An attention operation: `A_ij = gain * weight(s_ij) / Z(sum_j mass(s_ij))`.

    The scores are `s_ij = scale * <q_i, k_j> + bias_ij + offset`. Softmax is the similarity `exp` with the normalizer
    `sum`. docs/guides/add_an_operation.md adds one.

    Attributes:
        name: What messages call it.
        similarity: Entry of `SIMILARITIES`; it gives weight and mass.
        normalizer: Entry of `NORMALIZERS`; it gives Z.
        gain: Factor of all weights.
        power: The p of the normalizer `p_norm`; None for the others.
        offset: Number that is added to every score.
        scale: Factor of the products of queries and keys; None for 1 / sqrt(K). Kernels take a number, `dense` and
            `chunked` also take an array of one number that jax traces.
    """

    name: str
    similarity: Similarity
    normalizer: Normalizer
    gain: float = 1.0
    power: float | None = None
    offset: float = 0.0
    scale: float | jax.Array | None = None

    @property
    def uses_unit(self) -> bool:
        """Whether the similarity or the normalizer has a 1 beside exponentials (see `Similarity.uses_unit`)."""
        return self.similarity.uses_unit or self.normalizer.uses_unit


def resolve_operation(attention: spec.AttentionConfig, length: int = 1) -> Operation:
    """Return the operation of a config's `model.attention`, for windows of `length` tokens.

    Args:
        attention: That part of the spec; its offset is in units of log(length).
        length: Tokens of a training window.
    """
    return Operation(
        f'{attention.similarity} with {attention.normalizer}',
        SIMILARITIES[attention.similarity],
        NORMALIZERS[attention.normalizer],
        attention.gain,
        attention.power,
        attention.offset * math.log(length),
    )
