"""How many operations a model wants, by hand: products alone, a multiplication and an addition being two."""

import dataclasses

from sinklab import spec
from sinklab.attend.mask import mask_of
from sinklab.model.attention import COMBINATIONS
from sinklab.model.columns import count
from sinklab.model.ffn import FFNS
from sinklab.model.gate import GATES

TRAINED = 3  # a gradient is two products for each one of the forward pass


@dataclasses.dataclass(frozen=True)
class Flops:
    """Of the forward pass, for each token."""

    projections: float  # of queries, keys and values, of heads to one vector, of gates and feature maps
    attention: float
    ffn: float
    head: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def forward(model: spec.Model, length: int, masked: bool = True) -> Flops:
    """By the config; of scores, those that the mask shows (half of them under a causal one), or all."""
    combination = COMBINATIONS[model.combination]
    width, heads, groups, key = model.width, model.heads, model.groups, model.head_width
    value = width if combination.wide else key
    maps = width * (heads * key + groups * (key + value)) + of_output(model)
    maps += gate(model, value) + (4 * heads * key * key if model.attention.feature_map == 'mlp' else 0)
    keys = seen(model.mask, length) if masked else length
    return Flops(
        projections=2 * model.layers * maps,
        attention=2 * model.layers * heads * (keys + count(model)) * (key + value),
        ffn=2 * model.layers * width * model.ffn_width * (3 if FFNS[model.ffn][1] else 2),
        head=2 * width * model.vocabulary,
    )


def again(model: spec.Model, length: int, remat: str) -> float:
    """Of the forward pass, for each token, what the backward pass makes again."""
    one = forward(model, length)
    outward = 2 * model.layers * model.width * model.ffn_width  # of the FFN; nothing backward reads what it gives
    middle = 2 * model.layers * of_output(model)
    parts = {'attention': one.attention, 'qkv': one.projections - middle, 'middle': middle}
    parts['ffn'] = one.ffn - outward
    return sum(part for name, part in parts.items() if name not in spec.names_kept(remat))


def of_output(model: spec.Model) -> int:
    """Entries of W_O."""
    combination = COMBINATIONS[model.combination]
    value = model.width if combination.wide else model.head_width
    return (1 if combination.added else model.heads) * value * model.width


def gate(model: spec.Model, value: int) -> int:
    kind = GATES[model.gate]
    if kind is None:
        return 0
    inputs = model.width if kind.of == 'x' else value
    return inputs * (1 if kind.shared and kind.of == 'x' else model.heads) * (value if kind.wide else 1)


def seen(mask: spec.Mask, length: int) -> float:
    """How many keys of the text a query sees, on the mean; of documents, as if each window were one."""
    start_T, end_T = mask_of(dataclasses.replace(mask, document=False), length, None).hull_2T
    return float((end_T - start_T).mean())


def step(spec: spec.Spec) -> float:
    """Of one update."""
    tokens = spec.optimizer.batch_size * spec.data.length
    return TRAINED * tokens * forward(spec.model, spec.data.length).total
