"""An operation: how much each query gives each key, as a function of their scores."""

import dataclasses
import math

from sinklab import spec
from sinklab.attend.normalizer import NORMALIZERS, Normalizer
from sinklab.attend.similarity import SIMILARITIES, Similarity


@dataclasses.dataclass(frozen=True)
class Operation:
    """A_ij = gain * weight(s_ij) / Z(sum_j mass(s_ij)), s_ij = <q_i, k_j> / sqrt(K) + bias_ij + offset."""

    name: str
    similarity: Similarity
    normalizer: Normalizer
    gain: float = 1.0
    power: float | None = None  # p of p_norm
    offset: float = 0.0

    @property
    def uses_unit(self) -> bool:
        return self.similarity.uses_unit or self.normalizer.uses_unit


def operation(attention: spec.Attention, length: int = 1) -> Operation:
    """What a spec says of a model that is trained on windows of so many tokens."""
    return Operation(
        f'{attention.similarity} with {attention.normalizer}',
        SIMILARITIES[attention.similarity],
        NORMALIZERS[attention.normalizer],
        attention.gain,
        attention.power,
        attention.offset * math.log(length),
    )
