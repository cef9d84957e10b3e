"""Conversion of parameters between the names and shapes of transformers and ours.

A linear weight of transformers is (outputs, inputs). Ours is (inputs, outputs), with an axis of its own for heads.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from flax import nnx

from sinklab.config import spec
from sinklab.model.transformer import Transformer
from sinklab.parallel import sharding
from sinklab.run_dir import flatten_dict
from sinklab.schema import UserError

HF_NAMES = {
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
COMPUTED_PATTERN = re.compile(r'rotary_emb\.inv_freq$')  # of older checkpoints; computed, no parameter


class ArrayReader(Protocol):
    """A reader of arrays by their names in transformers."""

    shapes: dict[str, tuple[int, ...]]

    def read_array(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """The shape of a parameter in one layer, the number of layers, and the number of its input axes."""

    shape: tuple[int, ...]
    num_layers: int | None
    num_input_axes: int | None

    @property
    def hf_shape(self) -> tuple[int, ...]:
        if self.num_input_axes:
            return math.prod(self.shape[self.num_input_axes :]), math.prod(self.shape[: self.num_input_axes])
        return self.shape if self.num_layers is None else (math.prod(self.shape),)

    def convert_to_hf(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(
            array.reshape(self.hf_shape[::-1]).T if self.num_input_axes else array.reshape(self.hf_shape)
        )

    def convert_from_hf(self, array: np.ndarray) -> np.ndarray:
        return (array.T if self.num_input_axes else array).reshape(self.shape)

    def get_hf_names(self, name: str) -> list[str]:
        return [name] if self.num_layers is None else [name.format(layer) for layer in range(self.num_layers)]


def list_parameters(model: spec.ModelConfig) -> dict[str, ParameterSpec]:
    """List the parameters of a model under our names."""

    def make_spec(parameter: nnx.Variable) -> ParameterSpec:
        is_stacked = sharding.get_logical_axes(parameter)[:1] == ('layer',)
        shape = parameter.shape[is_stacked:]
        return ParameterSpec(shape, model.layers if is_stacked else None, parameter.get_metadata()['inputs'])

    abstract_model = nnx.eval_shape(lambda: Transformer(model, 1, nnx.Rngs(0)))
    specs = flatten_dict(sharding.map_parameters(make_spec, nnx.state(abstract_model)))
    return {name: specs[name] for name in HF_NAMES if name in specs}


def read_params(model: spec.ModelConfig, reader: ArrayReader, source: str) -> dict[str, Any]:
    """Read the parameters of a model in float32.

    Raises:
        UserError: The files lack an array, hold an unknown one, or a shape differs.
    """
    parameters = list_parameters(model)
    check_arrays(model, parameters, reader.shapes, source)
    tree: dict[str, Any] = {}
    for name, parameter in parameters.items():
        layer_arrays = (
            parameter.convert_from_hf(reader.read_array(hf_name))
            for hf_name in parameter.get_hf_names(HF_NAMES[name])
        )
        *parents, last = name.split('.')
        parent = functools.reduce(lambda tree, name: tree.setdefault(name, {}), parents, tree)
        parent[last] = (
            next(layer_arrays).astype(np.float32)
            if parameter.num_layers is None
            else stack_layers(layer_arrays, parameter)
        )
    return tree


def stack_layers(layer_arrays: Iterator[np.ndarray], parameter: ParameterSpec) -> np.ndarray:
    array = np.empty((parameter.num_layers, *parameter.shape), np.float32)
    for layer, layer_array in enumerate(layer_arrays):
        array[layer] = layer_array
    return array


def check_arrays(
    model: spec.ModelConfig, parameters: dict[str, ParameterSpec], shapes: dict[str, tuple[int, ...]], source: str
) -> None:
    expected = {
        hf_name: parameter.hf_shape
        for name, parameter in parameters.items()
        for hf_name in parameter.get_hf_names(HF_NAMES[name])
    }
    if missing := [name for name in expected if name not in shapes]:
        others = f' and {len(missing) - 1} more arrays' if missing[1:] else ''
        raise UserError(f'{source} lacks {missing[0]}{others}: it is not whole, or of another model; get it again')
    unused = [name for name in shapes if name not in expected and not COMPUTED_PATTERN.search(name)]
    if unused := [name for name in unused if not (model.tied and name == HF_NAMES['head_VD'])]:
        raise UserError(f'{source} holds {unused[0]}, for which the model of its config.json has no use here')
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(f'{source}: {name} has the shape {shapes[name]}, and its config.json says {shape}')


def convert_params(
    model: spec.ModelConfig, params: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """Yield (name, shape, function that returns the array) of each array in the format of transformers."""
    flat_params = flatten_dict(params)
    for name, parameter in list_parameters(model).items():
        for layer, hf_name in enumerate(parameter.get_hf_names(HF_NAMES[name])):
            array = flat_params[name] if parameter.num_layers is None else flat_params[name][layer]
            yield hf_name, parameter.hf_shape, functools.partial(parameter.convert_to_hf, array)
