"""Conversion between a Hugging Face config.json and the fields of a config."""

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.config import spec
from sinklab.schema import UserError, format_unknown_name

# Defaults of transformers for keys that a config.json leaves out: of all model types, and of each.
TRANSFORMERS_DEFAULTS = dict(hidden_act='silu', rms_norm_eps=1e-6, tie_word_embeddings=False, max_window_layers=28)
MODEL_TYPES: dict[str, dict[str, Any]] = {
    'llama': dict(architectures=['LlamaForCausalLM']),
    'mistral': dict(architectures=['MistralForCausalLM'], num_key_value_heads=8, sliding_window=4096),
    'qwen2': dict(architectures=['Qwen2ForCausalLM'], num_key_value_heads=32),
    'qwen3': dict(architectures=['Qwen3ForCausalLM'], num_key_value_heads=32, head_dim=128),
}
FIELD_OF_KEY = {
    'num_hidden_layers': 'layers',
    'hidden_size': 'width',
    'num_attention_heads': 'heads',
    'intermediate_size': 'ffn_width',
    'vocab_size': 'vocabulary',
}
# Keys of features that our model lacks, with the values that turn the feature off.
UNSUPPORTED_KEYS = {
    'hidden_act': ('swish', 'silu'),
    'attention_bias': (None, False),
    'mlp_bias': (None, False),
    'partial_rotary_factor': (None, 1),
    'quantization_config': (None,),
}
ROPE_SCALING_FIELDS = {'factor': 'factor', 'low_freq_factor': 'slow', 'high_freq_factor': 'fast'}
ORIGINAL_LENGTH_KEY = 'original_max_position_embeddings'
ROPE_TYPE_KEYS = {'default': (), 'linear': ('factor',), 'llama3': tuple(ROPE_SCALING_FIELDS)}
ROPE_KEYS = {'rope_type', 'type', 'rope_theta', ORIGINAL_LENGTH_KEY, *ROPE_SCALING_FIELDS}

# Fields of the model config with the only value that can be exported.
EXPORTABLE_VALUES = {
    'position': 'rotary',
    'ffn': 'swiglu',
    'norm': 'pre',
    'head_norm': False,
    'combination': 'concatenate',
    'gate': 'none',
    'attention.similarity': 'exp',
    'attention.normalizer': 'sum',
    'attention.feature_map': 'identity',
    'attention.gain': 1.0,
    'mask.prefix': None,
    'mask.block': None,
    'columns.kind': 'none',
}
DEFAULT_LENGTH = 2048  # of training windows, if the model takes that many tokens


def parse_hf_config(hf_config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse a config.json into config fields by their dotted names: those of the model, and `data.length`."""
    model_type = hf_config.get('model_type')
    if model_type not in MODEL_TYPES:
        raise UserError(
            f'{name}: {format_unknown_name(f"model_type {model_type!r}", str(model_type), MODEL_TYPES, "read here")}'
        )
    config = TRANSFORMERS_DEFAULTS | MODEL_TYPES[model_type] | hf_config
    if problem := next(find_problems(config), None):
        raise UserError(f'{name}: {problem}')
    heads = config['num_attention_heads']
    kv_heads = config.get('num_key_value_heads') or heads
    max_length, window = config['max_position_embeddings'], get_window(config, name)
    window = window if window and window < max_length else None
    length = 2 * window if window and window >= DEFAULT_LENGTH else DEFAULT_LENGTH
    return {
        **{f'model.{own_field}': config[key] for key, own_field in FIELD_OF_KEY.items()},
        'model.kv_heads': None if kv_heads == heads else kv_heads,
        'model.head_width': config.get('head_dim') or config['hidden_size'] // heads,
        'model.position': 'rotary',
        **{f'model.rotary.{field}': value for field, value in parse_rope(config, name).items()},
        'model.qkv_bias': model_type == 'qwen2',
        'model.qk_norm': model_type == 'qwen3',
        'model.norm_epsilon': float(config['rms_norm_eps']),
        'model.tied': config['tie_word_embeddings'],
        'model.mask.window': window,
        'data.length': min(max_length, length),
    }


def find_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for key in (*FIELD_OF_KEY, 'max_position_embeddings', 'num_key_value_heads', 'head_dim', 'sliding_window'):
        value = config.get(key)
        optional = key in ('num_key_value_heads', 'head_dim', 'sliding_window') and value is None
        if not optional and (type(value) is not int or value < 1):
            yield f'{key} is {value!r}, which must be a whole number above 0'
    if type(config['rms_norm_eps']) not in (int, float):
        yield f'rms_norm_eps is {config["rms_norm_eps"]!r}, which must be a number'
    for key, allowed in UNSUPPORTED_KEYS.items():
        if config.get(key) not in allowed:
            yield f'{key} is {config[key]!r}, which no model here has; it may be {allowed[-1]!r}'


def get_window(config: Mapping[str, Any], name: str) -> int | None:
    """Return the window of sliding-window attention, None if there is none; all layers must have the same."""
    model_type, layers, window = config['model_type'], config['num_hidden_layers'], config.get('sliding_window')
    if model_type == 'llama' or (model_type != 'mistral' and not config.get('use_sliding_window')):
        window = None
    first_layer = 0 if model_type == 'mistral' else config['max_window_layers']
    is_sliding = [window is not None and layer >= first_layer for layer in range(layers)]
    if layer_types := config.get('layer_types'):
        is_sliding = [layer_type != 'full_attention' for layer_type in layer_types]
    if len(set(is_sliding)) > 1:
        raise UserError(f'{name}: sliding_window is {window} in some layers alone; here all of them have one mask')
    return window if is_sliding[0] else None


def parse_rope(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse rope_parameters, or rope_scaling and rope_theta of older versions of transformers."""
    key = 'rope_scaling' if config.get('rope_scaling') else 'rope_parameters'
    rope = config.get(key) or {}
    rope_type = rope.get('rope_type', rope.get('type', 'default'))
    if rope_type not in ROPE_TYPE_KEYS:
        raise UserError(f'{name}: {key} of type {rope_type!r} is not computed here; {", ".join(ROPE_TYPE_KEYS)} are')
    if unsupported := sorted(key for key in rope.keys() - ROPE_KEYS if rope[key] not in (None, 1)):
        raise UserError(f'{name}: {key} has {unsupported[0]}, which is not computed here')
    rope_fields = dict(base=rope.get('rope_theta', config.get('rope_theta', 10_000.0)))
    rope_fields |= {
        ROPE_SCALING_FIELDS[scaling_key]: rope.get(scaling_key) for scaling_key in ROPE_TYPE_KEYS[rope_type]
    }
    if any(type(value) not in (int, float) for value in rope_fields.values()):
        raise UserError(
            f'{name}: {key} is {rope!r}; of type {rope_type} it has numbers for '
            f'{", ".join(ROPE_TYPE_KEYS[rope_type])}'
        )
    rope_fields = {field: float(value) for field, value in rope_fields.items()}
    if rope_type == 'llama3':
        max_length = rope.get(ORIGINAL_LENGTH_KEY, config['max_position_embeddings'])
        rope_fields['length'] = config.get(ORIGINAL_LENGTH_KEY, max_length)
    return rope_fields | dict(scaling={'default': 'none'}.get(rope_type, rope_type))


def make_hf_config(model: spec.ModelConfig, length: int, begin_token: int, end_token: int) -> dict[str, Any]:
    """Make the config.json of a model.

    Args:
        model: The config of the model.
        length: The maximum number of tokens of a text.
        begin_token: The id of BOS.
        end_token: The id of the end-of-text token.

    Raises:
        UserError: transformers has no model type for this config.
    """
    for field, exportable in EXPORTABLE_VALUES.items():
        if (value := get_field(model, field)) != exportable:
            raise UserError(
                f'config.model.{field} is {value}, which transformers cannot say of such a model; {exportable} it can'
            )
    if model.qkv_bias and model.qk_norm:
        raise UserError('config.model.qkv_bias and qk_norm are both set, which transformers has in no one model')
    model_type, window = get_model_type(model), model.mask.window
    window_fields = dict(sliding_window=window) if model_type == 'mistral' else {}
    if model_type.startswith('qwen'):
        first_layer = model.layers if window is None else 0
        window_fields = dict(
            use_sliding_window=window is not None, sliding_window=window, max_window_layers=first_layer
        )
    return {
        'architectures': MODEL_TYPES[model_type]['architectures'],
        'model_type': model_type,
        **{key: getattr(model, own_field) for key, own_field in FIELD_OF_KEY.items()},
        'num_key_value_heads': model.num_kv_heads,
        'head_dim': model.head_width,
        'hidden_act': 'silu',
        'rms_norm_eps': model.norm_epsilon,
        'tie_word_embeddings': model.tied,
        'attention_bias': False,
        'mlp_bias': False,
        'attention_dropout': 0.0,
        'max_position_embeddings': length,
        **make_rope_fields(model.rotary),
        **window_fields,
        'bos_token_id': begin_token,
        'eos_token_id': end_token,
        'use_cache': True,
    }


def get_model_type(model: spec.ModelConfig) -> str:
    if model.qkv_bias or model.qk_norm:
        return 'qwen2' if model.qkv_bias else 'qwen3'
    return 'mistral' if model.mask.window or model.width % model.heads else 'llama'


def make_rope_fields(rotary: spec.RotaryConfig) -> dict[str, Any]:
    """Return the rope fields of current and of older versions of transformers.

    A version that finds only the fields of the other would use rope_theta 10000.
    """
    rope_type = {'none': 'default'}.get(rotary.scaling, rotary.scaling)
    scaling = {key: getattr(rotary, ROPE_SCALING_FIELDS[key]) for key in ROPE_TYPE_KEYS[rope_type]}
    scaling |= {ORIGINAL_LENGTH_KEY: rotary.length} if rope_type == 'llama3' else {}
    parameters = dict(rope_type=rope_type, rope_theta=rotary.base, **scaling)
    legacy_scaling = None if rope_type == 'default' else dict(rope_type=rope_type, **scaling)
    return dict(rope_parameters=parameters, rope_theta=rotary.base, rope_scaling=legacy_scaling)


def get_field(model: spec.ModelConfig, field: str) -> Any:
    for name in field.split('.'):
        model = getattr(model, name)
    return model
