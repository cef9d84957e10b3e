"""Conversion of runs to Hugging Face models and back, and a parity check against transformers.

A linear weight of transformers is (outputs, inputs). Ours is (inputs, outputs), with an axis of its own for heads.
"""

import copy
import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.differences import flatten_dict
from sinklab.config.spec import ModelConfig, RotaryConfig, Spec
from sinklab.data import tokenizer as tokens
from sinklab.data.store import TOKENIZER_FILE
from sinklab.data.tokenizer import Tokenizer
from sinklab.errors import UserError
from sinklab.hf import files
from sinklab.hf.files import import_hf_library
from sinklab.model.transformer import Transformer
from sinklab.parallel import sharding
from sinklab.run_dir import RunDir
from sinklab.storage.files import open_writable_folder
from sinklab.storage.paths import is_remote

# Fields of our model that all types share, with the only value that transformers has.
COMMON_FIELDS = {
    'position': 'rotary',
    'head_norm': False,
    'combination': 'concatenate',
    'gate': 'none',
    'norm_kind': 'rms',
    'forget_gate': False,
    'value_residual': False,
    'exclusive': 'none',
    'attention.similarity': 'exp',
    'attention.normalizer': 'sum',
    'attention.feature_map': 'identity',
    'attention.gain': 1.0,
    'attention.gamma': 0.0,
    'attention.zeta': 1.0,
    'mask.prefix': None,
    'mask.block': None,
    'learned_kv.kind': 'none',
    'global_layers.position': 'rotary',
}
LLAMA_FIELDS = dict(norm='pre', ffn='swiglu', scaled_embedding=False, qk_norm=False, qkv_bias=False)
NO_GLOBAL_LAYERS = {'global_layers.every': None}
NO_WINDOW = NO_GLOBAL_LAYERS | {'mask.window': None}
GEMMA_FIELDS = LLAMA_FIELDS | dict(norm='sandwich', ffn='geglu_tanh', scaled_embedding=True, qk_norm=True)


@dataclasses.dataclass(frozen=True)
class ModelType:
    """A model type of transformers.

    Attributes:
        architecture: The name of its class.
        fields: The values of our config fields that the type decides.
        activation: The key of the activation, and its values for our `ffn`.
    """

    architecture: str
    fields: dict[str, Any]
    activation: tuple[str, tuple[str, ...]] = ('hidden_act', ('swish', 'silu'))

    @property
    def has_window(self) -> bool:
        return 'mask.window' not in self.fields

    @property
    def has_global_layers(self) -> bool:
        return 'global_layers.every' not in self.fields


# Of the types that fit a model, the first is exported.
MODEL_TYPES = {
    'llama': ModelType('LlamaForCausalLM', LLAMA_FIELDS | NO_WINDOW),
    'mistral': ModelType('MistralForCausalLM', LLAMA_FIELDS | NO_GLOBAL_LAYERS),
    'qwen2': ModelType('Qwen2ForCausalLM', LLAMA_FIELDS | NO_WINDOW | dict(qkv_bias=True)),
    'qwen3': ModelType('Qwen3ForCausalLM', LLAMA_FIELDS | NO_WINDOW | dict(qk_norm=True)),
    'gemma3_text': ModelType(
        'Gemma3ForCausalLM',
        GEMMA_FIELDS,
        activation=('hidden_activation', ('gelu_pytorch_tanh',)),
    ),
}
SIZE_FIELDS = {
    'num_hidden_layers': 'layers',
    'hidden_size': 'width',
    'num_attention_heads': 'heads',
    'intermediate_size': 'ffn_width',
    'vocab_size': 'vocabulary',
}
FIELD_OF_KEY = SIZE_FIELDS | {'rms_norm_eps': 'norm_epsilon', 'tie_word_embeddings': 'tied'}
# Keys of features that our model lacks, with the values that turn the feature off.
UNSUPPORTED_KEYS = {
    'attention_bias': (None, False),
    'mlp_bias': (None, False),
    'attn_logit_softcapping': (None,),
    'final_logit_softcapping': (None,),
    'use_bidirectional_attention': (None, False),
    'quantization_config': (None,),
}
ORIGINAL_LENGTH_KEY = 'original_max_position_embeddings'
# {rope_type: {key: field of RotaryConfig}}
ROPE_TYPES = {
    'default': {},
    'linear': {'factor': 'factor'},
    'llama3': {
        'factor': 'factor',
        'low_freq_factor': 'slow',
        'high_freq_factor': 'fast',
        ORIGINAL_LENGTH_KEY: 'length',
    },
}
ROPE_KEYS = {'rope_type', 'type', 'rope_theta', *ROPE_TYPES['llama3']}
FULL, SLIDING = 'full_attention', 'sliding_attention'  # layer types of transformers
DEFAULT_LENGTH = 2048  # of training windows, if the model takes that many tokens
TOKENIZER_CONFIG_FILE = 'tokenizer_config.json'
# Files beside tokenizer.json that do not depend on the parameters.
COMPANION_FILES = TOKENIZER_CONFIG_FILE, 'special_tokens_map.json', 'chat_template.jinja', 'generation_config.json'


# config.json


def parse_hf_config(hf_config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse a config.json into config fields by their dotted names: those of the model, and `data.length`."""
    model_type: Any = hf_config.get('model_type')
    check_model_type(model_type, name)
    config = complete_config(hf_config, name)
    if problem := next(find_problems(config), None):
        raise UserError(f'{name}: {problem}')
    heads, kv_heads = config['num_attention_heads'], config['num_key_value_heads']
    layer_fields = parse_layers(config, name)
    max_length = config['max_position_embeddings']
    window = layer_fields['mask.window']
    length = 2 * window if window and window >= DEFAULT_LENGTH else DEFAULT_LENGTH
    fields = {
        **COMMON_FIELDS,
        **MODEL_TYPES[model_type].fields,
        **{own_field: config[key] for key, own_field in FIELD_OF_KEY.items()},
        'kv_heads': None if kv_heads == heads else kv_heads,
        'head_width': get_head_width(config),
        **layer_fields,
    }
    return {f'model.{field}': value for field, value in fields.items()} | {'data.length': min(max_length, length)}


def check_model_type(model_type: Any, name: str) -> None:
    """Refuse the family of a config.json if our own model cannot represent it."""
    if model_type not in MODEL_TYPES:
        raise UserError(
            f'{name}: model_type {model_type!r} cannot be imported; only text models of the types '
            f'{", ".join(MODEL_TYPES)} can'
        )


def complete_config(hf_config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a config.json with the current keys of transformers and its defaults."""
    with files.call_transformers(name) as transformers:
        config_class = transformers.CONFIG_MAPPING[hf_config['model_type']]
        return config_class.from_dict(copy.deepcopy(dict(hf_config))).to_dict()


def get_head_width(config: Mapping[str, Any]) -> int:
    return config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']


def find_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for key in (*SIZE_FIELDS, 'max_position_embeddings'):
        if config[key] < 1:
            yield f'{key} is {config[key]!r}, which must be a whole number above 0'
    for key, allowed in (MODEL_TYPES[config['model_type']].activation, *UNSUPPORTED_KEYS.items()):
        if config.get(key) not in allowed:
            yield f'{key} is {config[key]!r}, which is not supported; use {allowed[-1]!r}'
    head_width = get_head_width(config)
    if (scalar := config.get('query_pre_attn_scalar', head_width)) != head_width:
        yield f'query_pre_attn_scalar is {scalar!r}, which is not supported; use head_dim, {head_width!r}'
    if unknown := [kind for kind in config.get('layer_types') or () if kind not in (FULL, SLIDING)]:
        yield f'layer_types has {unknown[0]!r}, which is not supported; use {FULL} and {SLIDING}'


def parse_layers(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse the window and the rotary positions of all layers, and those of global layers.

    Raises:
        UserError: Layers differ otherwise than our global layers do.
    """
    model_type = MODEL_TYPES[config['model_type']]
    window = config.get('sliding_window')
    rope = config['rope_parameters']
    layer_types = config.get('layer_types') or ()
    is_windowed = window is not None and window < config['max_position_embeddings'] and model_type.has_window
    if not model_type.has_global_layers and SLIDING in layer_types:
        raise UserError(f'{name}: sliding_window is {window} in some layers; only all layers of mistral can have one')
    if not model_type.has_global_layers or SLIDING not in layer_types:
        rotary = parse_rope(config, rope[FULL] if model_type.has_global_layers else rope, name)
        fields = {'mask.window': window if is_windowed and not model_type.has_global_layers else None}
        return fields | {f'rotary.{field}': value for field, value in rotary.items()}
    every = next((number for number, kind in enumerate(layer_types, 1) if kind == FULL), len(layer_types) + 1)
    if any((kind == FULL) != (number % every == 0) for number, kind in enumerate(layer_types, 1)):
        raise UserError(
            f'{name}: sliding_window is {window} in some layers; only layers n, 2n, 3n, ... may have none'
        )
    local_rotary, global_rotary = (parse_rope(config, rope[kind], name) for kind in (SLIDING, FULL))
    fields = {'mask.window': window if is_windowed else None}
    fields |= {f'rotary.{field}': value for field, value in local_rotary.items()}
    if every > len(layer_types) or (not is_windowed and global_rotary == local_rotary):
        return fields
    global_fields = {f'global_layers.rotary.{field}': value for field, value in global_rotary.items()}
    return fields | {'global_layers.every': every} | global_fields


def parse_rope(config: Mapping[str, Any], rope: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse rotary positions into fields of RotaryConfig."""
    rope_type = rope['rope_type']
    if rope_type not in ROPE_TYPES:
        raise UserError(f'{name}: rope_type {rope_type!r} is not supported; use {", ".join(ROPE_TYPES)}')
    if unsupported := sorted(key for key in rope.keys() - ROPE_KEYS if rope[key] not in (None, 1)):
        raise UserError(f'{name}: rotary positions have {unsupported[0]}, which is not supported')
    rope = {ORIGINAL_LENGTH_KEY: config['max_position_embeddings']} | rope
    if missing := [key for key in ROPE_TYPES[rope_type] if rope.get(key) is None]:
        raise UserError(f'{name}: rotary positions of type {rope_type} lack {missing[0]}')
    fields = {own_field: rope[key] for key, own_field in ROPE_TYPES[rope_type].items()}
    return fields | dict(base=float(rope['rope_theta']), scaling={'default': 'none'}.get(rope_type, rope_type))


def make_hf_config(model: ModelConfig, length: int) -> dict[str, Any]:
    """Make the config.json of a model, without token ids, for texts of at most `length` tokens.

    Raises:
        UserError: transformers has no model type for this config.
    """
    name = select_model_type(model)
    model_type = MODEL_TYPES[name]
    activation_key, activations = model_type.activation
    config = {
        'architectures': [model_type.architecture],
        'model_type': name,
        **{key: getattr(model, own_field) for key, own_field in FIELD_OF_KEY.items()},
        'num_key_value_heads': model.num_kv_heads,
        'head_dim': model.head_width,
        activation_key: activations[-1],
        'max_position_embeddings': length,
        'rope_parameters': make_rope_parameters(model.rotary),
    }
    # Readers before transformers 5 know these keys alone, and would take a rope_theta of 10000 and no scaling.
    rope_scaling = make_rope_parameters(model.layer_types[-1].rotary)
    config['rope_theta'] = rope_scaling.pop('rope_theta')
    config['rope_scaling'] = None if rope_scaling['rope_type'] == 'default' else rope_scaling
    if model_type.has_global_layers:
        rope = {FULL: make_rope_parameters(model.layer_types[-1].rotary), SLIDING: config['rope_parameters']}
        is_local_L = [not is_global for is_global in model.layer_type_indices]
        if len(model.layer_types) == 1:
            is_local_L = [model.mask.window is not None] * model.layers
        layer_types = [SLIDING if is_local else FULL for is_local in is_local_L]
        config['rope_local_base_freq'] = model.rotary.base
        config |= dict(rope_parameters=rope, layer_types=layer_types, query_pre_attn_scalar=model.head_width)
    if model_type.has_window:
        config['sliding_window'] = model.mask.window or (length if model_type.has_global_layers else None)
    return config


def select_model_type(model: ModelConfig) -> str:
    """Return the first model type that fits a model; raise UserError if none fits."""
    fields = flatten_dict(dataclasses.asdict(model))
    differences = {
        name: [field for field, value in (COMMON_FIELDS | model_type.fields).items() if fields[field] != value]
        for name, model_type in MODEL_TYPES.items()
    }
    name = min(differences, key=lambda name: len(differences[name]))
    if different := differences[name]:
        given = ', '.join(f'config.model.{field}={fields[field]}' for field in different)
        needed = ', '.join(str((COMMON_FIELDS | MODEL_TYPES[name].fields)[field]) for field in different)
        raise UserError(f'transformers has no such model with {given}; the nearest type, {name}, needs {needed}')
    return name


def make_rope_parameters(rotary: RotaryConfig) -> dict[str, Any]:
    rope_type = {'none': 'default'}.get(rotary.scaling, rotary.scaling)
    scaling = {key: getattr(rotary, own_field) for key, own_field in ROPE_TYPES[rope_type].items()}
    return dict(rope_type=rope_type, rope_theta=rotary.base, **scaling)


# Parameters


HF_NAMES = {
    'embedding_VD': 'model.embed_tokens.weight',
    'blocks.attention_norms.before.gain_D': 'model.layers.{}.input_layernorm.weight',
    'blocks.attention_norms.after.gain_D': 'model.layers.{}.post_attention_layernorm.weight',
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
    'blocks.ffn_norms.after.gain_D': 'model.layers.{}.post_feedforward_layernorm.weight',
    'blocks.ffn.gate_DF': 'model.layers.{}.mlp.gate_proj.weight',
    'blocks.ffn.in_DF': 'model.layers.{}.mlp.up_proj.weight',
    'blocks.ffn.out_FD': 'model.layers.{}.mlp.down_proj.weight',
    'norm.gain_D': 'model.norm.weight',
    'head_VD': 'lm_head.weight',
}
# The name of the norm before the FFN where there is also a norm after attention, as in Gemma 3.
SANDWICH_NAMES = {'blocks.ffn_norms.before.gain_D': 'model.layers.{}.pre_feedforward_layernorm.weight'}
GEMMA_GAIN_OFFSET = 1.0  # gains of Gemma 3 are stored less this number


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """The shape of a parameter in one layer, the number of layers, the number of its input axes, and its names."""

    shape: tuple[int, ...]
    num_layers: int | None
    num_input_axes: int | None
    hf_name: str = ''  # with {} for the layer
    offset: float = 0.0  # of our array from that of transformers

    def convert_to_hf(self, array: np.ndarray) -> np.ndarray:
        if self.offset:
            array = np.asarray(array, np.float32) - np.float32(self.offset)
        if self.num_input_axes:
            return np.ascontiguousarray(array.reshape(math.prod(self.shape[: self.num_input_axes]), -1).T)
        return array if self.num_layers is None else array.reshape(-1)

    def convert_from_hf(self, array: np.ndarray) -> np.ndarray:
        if self.offset:
            array = array.astype(np.float32) + np.float32(self.offset)
        return (array.T if self.num_input_axes else array).reshape(self.shape)

    @property
    def hf_names(self) -> list[str]:
        if self.num_layers is None:
            return [self.hf_name]
        return [self.hf_name.format(layer) for layer in range(self.num_layers)]


def list_parameters(model: ModelConfig) -> dict[str, ParameterSpec]:
    """List the parameters of a model under our names."""

    def make_spec(parameter: nnx.Variable) -> ParameterSpec:
        is_stacked = sharding.get_logical_axes(parameter)[:1] == ('layer',)
        shape = parameter.shape[is_stacked:]
        return ParameterSpec(shape, model.layers if is_stacked else None, parameter.get_metadata()['inputs'])

    abstract_model = nnx.eval_shape(lambda: Transformer(model, 1, nnx.Rngs(0)))
    specs = flatten_dict(sharding.map_parameters(make_spec, nnx.state(abstract_model)))
    hf_names = HF_NAMES | (SANDWICH_NAMES if model.norm == 'sandwich' else {})
    gain_offset = GEMMA_GAIN_OFFSET if model.norm == 'sandwich' else 0.0
    return {
        name: dataclasses.replace(
            specs[name], hf_name=hf_name, offset=gain_offset if name.endswith('.gain_D') else 0.0
        )
        for name, hf_name in hf_names.items()
        if name in specs
    }


def convert_hf_arrays(model: ModelConfig, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a model in float32.

    Args:
        model: The config.
        arrays: The tensors of PyTorch by their names in transformers.
    """
    flat_params = {}
    for name, parameter in list_parameters(model).items():
        array = np.empty((len(parameter.hf_names), *parameter.shape), np.float32)
        for index, hf_name in enumerate(parameter.hf_names):
            array[index] = parameter.convert_from_hf(arrays[hf_name].float().numpy())
        flat_params[name] = array[0] if parameter.num_layers is None else array
    return traverse_util.unflatten_dict(flat_params, sep='.')


def convert_params(model: ModelConfig, params: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays in the format of transformers, by their names there."""
    flat_params = flatten_dict(params)
    arrays = {}
    for name, parameter in list_parameters(model).items():
        for layer, hf_name in enumerate(parameter.hf_names):
            array = flat_params[name] if parameter.num_layers is None else flat_params[name][layer]
            arrays[hf_name] = np.asarray(parameter.convert_to_hf(array), jnp.dtype(dtype))
    return arrays


# Runs


def make_config_fields(source_dir: Path, final_dir: Path) -> dict[str, Any]:
    """Make the config fields of a Hugging Face model, by dotted names.

    Its tokenizer will lie in `final_dir`.
    """
    hf_config = files.read_json_object(source_dir / files.CONFIG_FILE)
    config_fields = parse_hf_config(hf_config, str(source_dir / files.CONFIG_FILE))
    name = str(source_dir / TOKENIZER_FILE)
    if not (source_dir / TOKENIZER_FILE).exists():
        raise UserError(f'{name} is missing; write it with AutoTokenizer.from_pretrained(...).save_pretrained(...)')
    tokenizer = tokens.load_tokenizer(source_dir / TOKENIZER_FILE)
    if (size := tokens.get_vocabulary_size(tokenizer)) > config_fields['model.vocabulary']:
        raise UserError(
            f'{name} has ids up to {size - 1}, and the vocab_size of {source_dir / files.CONFIG_FILE} is '
            f'{config_fields["model.vocabulary"]}: it belongs to another model'
        )
    end_token = get_first_id(hf_config.get('eos_token_id'))
    begin_token = get_first_id(hf_config.get('bos_token_id'))
    if end_token is None:
        raise UserError(f'{source_dir / files.CONFIG_FILE} has no eos_token_id, the end of documents; add one')
    fixed_token = begin_token if begin_token not in (None, end_token) else choose_other_token(tokenizer, end_token)
    names = tuple(f'{key} of {source_dir / files.CONFIG_FILE}' for key in ('eos_token_id', 'bos_token_id'))
    tokens.check_special_tokens(tokenizer, end_token, fixed_token, name, names)
    has_bos = begin_token == fixed_token and tokenizer.encode('').ids[:1] == [begin_token]
    return config_fields | {
        'probe.length': min(64, config_fields['data.length']),
        'probe.keys': min(10, config_fields['data.length']),
        'data.tokenizer': str(final_dir / TOKENIZER_FILE),
        'data.end_token': end_token,
        'data.fixed_token': fixed_token,
        'data.bos': 'documents' if has_bos else 'none',
    }


def get_first_id(value: Any) -> int | None:
    """Return the first token id of a value that is an id, a list of ids, or None; -1 is no id."""
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int and value >= 0 else None


def choose_other_token(tokenizer: Tokenizer, end_token: int) -> int:
    """Return the id of another token than `end_token`, of a special token if there is one."""
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return next(token_id for token_id in (*sorted(special), 0, 1) if token_id != end_token)


def import_model(source_dir: Path, spec: Spec, run_dir: RunDir, row: dict) -> int:
    """Write the run directory of a Hugging Face model; return its number of parameters.

    Raises:
        UserError: The files lack an array, hold an unknown one, or a shape differs.
    """
    problems = 'missing_keys', 'mismatched_keys', 'unexpected_keys'
    hf_model = files.load_model(source_dir, str(source_dir), problems, dtype='auto')
    params = convert_hf_arrays(spec.model, hf_model.state_dict())
    with open_writable_folder(run_dir.path):
        copy_tokenizer(source_dir / TOKENIZER_FILE, run_dir.path)
    data_fingerprint = dict(tokenizer=tokens.compute_tokenizer_digest(run_dir.path / TOKENIZER_FILE)[:16])
    checkpointer = Checkpointer(run_dir, spec.checkpoint, data_fingerprint)
    try:
        checkpointer.save(0, dict(step=np.zeros((), np.int32), params=params))
    finally:
        checkpointer.close()
    run_dir.initialize(spec, row)
    return sum(leaf.size for leaf in flatten_dict(params).values())


def check_export(spec: Spec, output_dir: Path, length: int | None) -> dict[str, Any]:
    """Check that a run can be exported; return the config.json of its model, without token ids.

    Raises:
        UserError: transformers has no such model, or the output directory cannot be used.
    """
    if spec.data.task != 'text':
        raise UserError(f'config.data.task is {spec.data.task}, which has no tokenizer; export a run on text')
    hf_config = make_hf_config(spec.model, length or spec.data.length)
    if is_remote(output_dir) or output_dir.exists():
        raise UserError(f'--out={output_dir} exists, or is in a bucket; give a new folder on a disk')
    for name in ('torch', 'transformers', 'safetensors'):
        import_hf_library(name)
    return hf_config


def export_model(
    spec: Spec, params: dict, hf_config: dict[str, Any], tokenizer_path: Path, output_dir: Path, dtype: str
) -> str:
    """Write a Hugging Face model directory; check its parity, and return the differences as text.

    It gets its name after the check.
    """
    with files.write_folder(output_dir) as unfinished:
        write_model_files(spec, params, hf_config, tokenizer_path, unfinished, dtype)
        return check_parity(unfinished, spec.model, params, hf_config['max_position_embeddings'], dtype)


def write_model_files(
    spec: Spec, params: dict, hf_config: dict[str, Any], tokenizer_path: Path, output_dir: Path, dtype: str
) -> None:
    """Write the config, the weights and the tokenizer.

    Texts begin with BOS if documents did in training, and otherwise with the token that ends texts.
    """
    data = spec.data
    token_ids = dict(
        bos_token_id=data.fixed_token if data.bos == 'documents' else data.end_token, eos_token_id=data.end_token
    )
    files.write_json(output_dir / files.CONFIG_FILE, hf_config | token_ids | dict(dtype=dtype))
    save_file = import_hf_library('safetensors.numpy').save_file
    save_file(convert_params(spec.model, params, dtype), output_dir / files.MODEL_FILE, metadata={'format': 'pt'})
    copy_tokenizer(tokenizer_path, output_dir)
    if not (output_dir / TOKENIZER_CONFIG_FILE).exists():
        id_to_token = tokens.load_tokenizer(tokenizer_path).id_to_token
        tokenizer_config = dict(
            tokenizer_class='PreTrainedTokenizerFast',
            bos_token=id_to_token(token_ids['bos_token_id']),
            eos_token=id_to_token(token_ids['eos_token_id']),
            model_max_length=hf_config['max_position_embeddings'],
            model_input_names=['input_ids', 'attention_mask'],
        )
        files.write_json(output_dir / TOKENIZER_CONFIG_FILE, tokenizer_config)


def copy_tokenizer(path: Path, output_dir: Path) -> None:
    """Copy a tokenizer.json and the files beside it that belong to it."""
    shutil.copyfile(path, output_dir / TOKENIZER_FILE)
    for name in COMPANION_FILES:
        if path.with_name(name).exists():
            shutil.copyfile(path.with_name(name), output_dir / name)


# Parity

# Of the largest logit, at least 1, for each 4 layers: rounding errors of float32 grow with the number of layers.
RELATIVE_TOLERANCE = 1e-5
MIN_TOKENS, MAX_TOKENS = 64, 1024  # that are compared


def check_parity(model_dir: Path, model: ModelConfig, params: dict, length: int, dtype: str) -> str:
    """Compare a model directory with our model of these parameters; return the largest differences as text.

    Raises:
        UserError: The logits or the attention weights differ.
    """
    num_tokens = min(length, max(MIN_TOKENS, min((model.mask.window or 0) + 8, MAX_TOKENS)))  # beyond the window
    ids_BT = np.random.default_rng(0).integers(0, model.vocabulary, (2, num_tokens)).astype(np.int32)
    hf_model = files.load_model(model_dir, str(model_dir), dtype=import_hf_library('torch').float32)
    if dtype != 'float32':  # the parameters have been rounded
        params = convert_hf_arrays(model, hf_model.state_dict())
    own_outputs = compute_with_sinklab(model, params, ids_BT)
    hf_outputs = compute_with_transformers(hf_model, ids_BT)
    differences = [np.abs(own - other).max() for own, other in zip(own_outputs, hf_outputs, strict=True)]
    allowed = RELATIVE_TOLERANCE * max(1.0, np.abs(own_outputs[0]).max()) * max(1.0, model.layers / 4)
    text = (
        f'logits within {differences[0]:.1e} and attention within {differences[1]:.1e} of transformers '
        f'{import_hf_library("transformers").__version__}'
    )
    if not max(differences) <= allowed:
        raise UserError(f'{text}, but {allowed:.1e} is allowed; the files are not this model, and were deleted')
    return text


def compute_with_sinklab(model: ModelConfig, params: dict, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (logits_BTV, attention_LBHTS) in float32; each sequence is one document."""
    mask = dataclasses.replace(model.mask, document=False)
    model = dataclasses.replace(model, dtype='float32', mask=mask)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(model, ids_BT.shape[1], nnx.Rngs(0))))

    @jax.jit
    def forward_fn(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits_BTV, intermediates = nnx.merge(graph, params)(ids_BT, capture=True)
        return logits_BTV, intermediates.attention_BHTS

    return jax.device_get(forward_fn(params, ids_BT))


def compute_with_transformers(hf_model: Any, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (logits_BTV, attention_LBHTS) of a model of transformers."""
    torch = import_hf_library('torch')
    with torch.no_grad():
        outputs = hf_model(input_ids=torch.from_numpy(ids_BT).long(), output_attentions=True, use_cache=False)
    return outputs.logits.numpy(), np.stack([layer.numpy() for layer in outputs.attentions])
