"""One table between the names of transformers and ours, and arrays that go either way by it.

A linear map of transformers is (outputs, inputs), and ours the other way round, with heads apart.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from flax import nnx

from sinklab import sharding, spec
from sinklab.folder import flat
from sinklab.model.transformer import Transformer
from sinklab.record import Refusal

NAMES = {
    'embedding_VD': 'model.embed_tokens.weight',
    'blocks.attention_norms.before.gain_D': 'model.layers.{}.input_layernorm.weight',
    'blocks.attention.query_DHK': 'model.layers.{}.self_attn.q_proj.weight',
    'blocks.attention.key_DHK': 'model.layers.{}.self_attn.k_proj.weight',
    'blocks.attention.value_DHK': 'model.layers.{}.self_attn.v_proj.weight',
    'blocks.attention.output_HKD': 'model.layers.{}.self_attn.o_proj.weight',
    'blocks.attention.query_bias.vector_HK': 'model.layers.{}.self_attn.q_proj.bias',
    'blocks.attention.key_bias.vector_HK': 'model.layers.{}.self_attn.k_proj.bias',
    'blocks.attention.value_bias.vector_HK': 'model.layers.{}.self_attn.v_proj.bias',
    'blocks.attention.query_norm.gain_D': 'model.layers.{}.self_attn.q_norm.weight',
    'blocks.attention.key_norm.gain_D': 'model.layers.{}.self_attn.k_norm.weight',
    'blocks.ffn_norms.before.gain_D': 'model.layers.{}.post_attention_layernorm.weight',
    'blocks.ffn.gate_DF': 'model.layers.{}.mlp.gate_proj.weight',
    'blocks.ffn.in_DF': 'model.layers.{}.mlp.up_proj.weight',
    'blocks.ffn.out_FD': 'model.layers.{}.mlp.down_proj.weight',
    'norm.gain_D': 'model.norm.weight',
    'head_VD': 'lm_head.weight',
}
COMPUTED = re.compile(r'rotary_emb\.inv_freq$')  # which older checkpoints hold


class Arrays(Protocol):
    """Arrays that lie in files, by the names of transformers."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of ours: its shape in one layer, in how many, and how many of its axes a map reads."""

    shape: tuple[int, ...]
    layers: int | None
    inputs: int | None

    @property
    def theirs(self) -> tuple[int, ...]:
        if self.inputs:
            return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return self.shape if self.layers is None else (math.prod(self.shape),)

    def given_out(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.reshape(self.theirs[::-1]).T if self.inputs else array.reshape(self.theirs))

    def taken_in(self, array: np.ndarray) -> np.ndarray:
        return (array.T if self.inputs else array).reshape(self.shape)

    def names(self, name: str) -> list[str]:
        return [name] if self.layers is None else [name.format(layer) for layer in range(self.layers)]


def leaves(model: spec.Model) -> dict[str, Leaf]:
    """The parameters of a model, by our names."""

    def leaf(parameter: nnx.Variable) -> Leaf:
        stacked = sharding.logical(parameter)[:1] == ('layer',)
        shape = parameter.shape[stacked:]
        return Leaf(shape, model.layers if stacked else None, parameter.get_metadata()['inputs'])

    abstract = nnx.eval_shape(lambda: Transformer(model, 1, nnx.Rngs(0)))
    found = flat(sharding.by_parameter(leaf, nnx.state(abstract)))
    return {name: found[name] for name in NAMES if name in found}


def read(model: spec.Model, arrays: Arrays, source: str) -> dict[str, Any]:
    """The parameters of a model in float32, of files that hold all of them and nothing else."""
    wanted = leaves(model)
    check(model, wanted, arrays.shapes, source)
    tree: dict[str, Any] = {}
    for name, leaf in wanted.items():
        parts = (leaf.taken_in(arrays.read(one)) for one in leaf.names(NAMES[name]))
        *parents, last = name.split('.')
        at = functools.reduce(lambda tree, name: tree.setdefault(name, {}), parents, tree)
        at[last] = next(parts).astype(np.float32) if leaf.layers is None else stacked(parts, leaf)
    return tree


def stacked(parts: Iterator[np.ndarray], leaf: Leaf) -> np.ndarray:
    array = np.empty((leaf.layers, *leaf.shape), np.float32)
    for layer, part in enumerate(parts):
        array[layer] = part
    return array


def check(model: spec.Model, wanted: dict[str, Leaf], shapes: dict[str, tuple[int, ...]], source: str) -> None:
    expected = {one: leaf.theirs for name, leaf in wanted.items() for one in leaf.names(NAMES[name])}
    if missing := [name for name in expected if name not in shapes]:
        others = f' and {len(missing) - 1} more arrays' if missing[1:] else ''
        raise Refusal(f'{source} lacks {missing[0]}{others}: it is not whole, or of another model; get it again')
    unused = [name for name in shapes if name not in expected and not COMPUTED.search(name)]
    if unused := [name for name in unused if not (model.tied and name == NAMES['head_VD'])]:
        raise Refusal(f'{source} holds {unused[0]}, for which the model of its config.json has no use here')
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise Refusal(f'{source}: {name} has the shape {shapes[name]}, and its config.json says {shape}')


def write(
    model: spec.Model, params: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """(name, shape, the array) of each array of transformers."""
    ours = flat(params)
    for name, leaf in leaves(model).items():
        for layer, one in enumerate(leaf.names(NAMES[name])):
            part = ours[name] if leaf.layers is None else ours[name][layer]
            yield one, leaf.theirs, functools.partial(leaf.given_out, part)
