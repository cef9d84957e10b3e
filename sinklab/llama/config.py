"""config.json of LLaMA's family <-> the fields of a config: the same model, or a refusal by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab import spec
from sinklab.record import Refusal, unknown

# What transformers takes for what a config.json leaves out, of all kinds of model and of each.
ASSUMED = dict(hidden_act='silu', rms_norm_eps=1e-6, tie_word_embeddings=False, max_window_layers=28)
KINDS: dict[str, dict[str, Any]] = {
    'llama': dict(architectures=['LlamaForCausalLM']),
    'mistral': dict(architectures=['MistralForCausalLM'], num_key_value_heads=8, sliding_window=4096),
    'qwen2': dict(architectures=['Qwen2ForCausalLM'], num_key_value_heads=32),
    'qwen3': dict(architectures=['Qwen3ForCausalLM'], num_key_value_heads=32, head_dim=128),
}
SIZES = {
    'num_hidden_layers': 'layers',
    'hidden_size': 'width',
    'num_attention_heads': 'heads',
    'intermediate_size': 'ffn_width',
    'vocab_size': 'vocabulary',
}
# What a model here is not, with the values by which a config.json says that it is not that either.
ABSENT = {
    'hidden_act': ('swish', 'silu'),
    'attention_bias': (None, False),
    'mlp_bias': (None, False),
    'partial_rotary_factor': (None, 1),
    'quantization_config': (None,),
}
SCALED = {'factor': 'factor', 'low_freq_factor': 'slow', 'high_freq_factor': 'fast'}
LENGTH = 'original_max_position_embeddings'
USED = {'default': (), 'linear': ('factor',), 'llama3': tuple(SCALED)}
ROPE = {'rope_type', 'type', 'rope_theta', LENGTH, *SCALED}

# What an exported model is, by the fields that have other values.
PLAIN = {
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
USUAL_LENGTH = 2048  # of windows, where a model takes that many tokens


def fields(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Of a config.json: the fields of the model by their dotted names, and how long windows of text are."""
    kind = given.get('model_type')
    if kind not in KINDS:
        raise Refusal(f'{name}: {unknown(f"model_type {kind!r}", str(kind), KINDS, "read here")}')
    config = ASSUMED | KINDS[kind] | given
    if wrong := next(refusals(config), None):
        raise Refusal(f'{name}: {wrong}')
    heads = config['num_attention_heads']
    groups = config.get('num_key_value_heads') or heads
    longest, window = config['max_position_embeddings'], window_of(config, name)
    window = window if window and window < longest else None
    length = 2 * window if window and window >= USUAL_LENGTH else USUAL_LENGTH
    return {
        **{f'model.{ours}': config[theirs] for theirs, ours in SIZES.items()},
        'model.kv_heads': None if groups == heads else groups,
        'model.head_width': config.get('head_dim') or config['hidden_size'] // heads,
        'model.position': 'rotary',
        **{f'model.rotary.{field}': value for field, value in rotary(config, name).items()},
        'model.qkv_bias': kind == 'qwen2',
        'model.qk_norm': kind == 'qwen3',
        'model.norm_epsilon': float(config['rms_norm_eps']),
        'model.tied': config['tie_word_embeddings'],
        'model.mask.window': window,
        'data.length': min(longest, length),
    }


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    for key in (*SIZES, 'max_position_embeddings', 'num_key_value_heads', 'head_dim', 'sliding_window'):
        value = config.get(key)
        optional = key in ('num_key_value_heads', 'head_dim', 'sliding_window') and value is None
        if not optional and (type(value) is not int or value < 1):
            yield f'{key} is {value!r}, which must be a whole number above 0'
    if type(config['rms_norm_eps']) not in (int, float):
        yield f'rms_norm_eps is {config["rms_norm_eps"]!r}, which must be a number'
    for key, allowed in ABSENT.items():
        if config.get(key) not in allowed:
            yield f'{key} is {config[key]!r}, which no model here has; it may be {allowed[-1]!r}'


def window_of(config: Mapping[str, Any], name: str) -> int | None:
    """How many keys a query sees in every layer."""
    kind, layers, window = config['model_type'], config['num_hidden_layers'], config.get('sliding_window')
    if kind == 'llama' or (kind != 'mistral' and not config.get('use_sliding_window')):
        window = None
    first = 0 if kind == 'mistral' else config['max_window_layers']
    sliding = [window is not None and layer >= first for layer in range(layers)]
    if types := config.get('layer_types'):
        sliding = [one != 'full_attention' for one in types]
    if len(set(sliding)) > 1:
        raise Refusal(f'{name}: sliding_window is {window} in some layers alone; here all of them have one mask')
    return window if sliding[0] else None


def rotary(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """As it is written now, in rope_parameters, or as it was before, in rope_scaling beside rope_theta."""
    key = 'rope_scaling' if config.get('rope_scaling') else 'rope_parameters'
    given = config.get(key) or {}
    kind = given.get('rope_type', given.get('type', 'default'))
    if kind not in USED:
        raise Refusal(f'{name}: {key} of type {kind!r} is not computed here; {", ".join(USED)} are')
    if more := sorted(key for key in given.keys() - ROPE if given[key] not in (None, 1)):
        raise Refusal(f'{name}: {key} has {more[0]}, which is not computed here')
    found = dict(base=given.get('rope_theta', config.get('rope_theta', 10_000.0)))
    found |= {SCALED[one]: given.get(one) for one in USED[kind]}
    if any(type(value) not in (int, float) for value in found.values()):
        raise Refusal(f'{name}: {key} is {given!r}; of type {kind} it has numbers for {", ".join(USED[kind])}')
    found = {field: float(value) for field, value in found.items()}
    if kind == 'llama3':
        longest = given.get(LENGTH, config['max_position_embeddings'])
        found['length'] = config.get(LENGTH, longest)
    return found | dict(scaling={'default': 'none'}.get(kind, kind))


def written(model: spec.Model, length: int, begin: int, end: int) -> dict[str, Any]:
    """The config.json of a model that takes so many tokens; `begin` and `end` are ids."""
    for field, plain in PLAIN.items():
        if (value := reading(model, field)) != plain:
            raise Refusal(
                f'config.model.{field} is {value}, which transformers cannot say of such a model; {plain} it can'
            )
    if model.qkv_bias and model.qk_norm:
        raise Refusal('config.model.qkv_bias and qk_norm are both set, which transformers has in no one model')
    kind, window = kind_of(model), model.mask.window
    sliding = dict(sliding_window=window) if kind == 'mistral' else {}
    if kind.startswith('qwen'):
        first = model.layers if window is None else 0
        sliding = dict(use_sliding_window=window is not None, sliding_window=window, max_window_layers=first)
    return {
        'architectures': KINDS[kind]['architectures'],
        'model_type': kind,
        **{theirs: getattr(model, ours) for theirs, ours in SIZES.items()},
        'num_key_value_heads': model.groups,
        'head_dim': model.head_width,
        'hidden_act': 'silu',
        'rms_norm_eps': model.norm_epsilon,
        'tie_word_embeddings': model.tied,
        'attention_bias': False,
        'mlp_bias': False,
        'attention_dropout': 0.0,
        'max_position_embeddings': length,
        **rope(model.rotary),
        **sliding,
        'bos_token_id': begin,
        'eos_token_id': end,
        'use_cache': True,
    }


def kind_of(model: spec.Model) -> str:
    if model.qkv_bias or model.qk_norm:
        return 'qwen2' if model.qkv_bias else 'qwen3'
    return 'mistral' if model.mask.window or model.width % model.heads else 'llama'


def rope(rotary: spec.Rotary) -> dict[str, Any]:
    """In both ways: who reads one alone would take 10000 for what the other says."""
    kind = {'none': 'default'}.get(rotary.scaling, rotary.scaling)
    scaling = {theirs: getattr(rotary, SCALED[theirs]) for theirs in USED[kind]}
    scaling |= {LENGTH: rotary.length} if kind == 'llama3' else {}
    now = dict(rope_type=kind, rope_theta=rotary.base, **scaling)
    before = None if kind == 'default' else dict(rope_type=kind, **scaling)
    return dict(rope_parameters=now, rope_theta=rotary.base, rope_scaling=before)


def reading(model: spec.Model, field: str) -> Any:
    for name in field.split('.'):
        model = getattr(model, name)
    return model
