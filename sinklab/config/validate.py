"""Validation of a config: field types first, then rules between fields."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from sinklab.config.differences import flatten_dict
from sinklab.config.spec import (
    FFN_NAMES,
    NORMALIZERS_BY_SIMILARITY,
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    GlobalLayersConfig,
    ModelConfig,
    OptimizerConfig,
    RotaryConfig,
    Spec,
    get_field_types,
)
from sinklab.errors import UserError, format_names, format_unknown_name, raise_errors

MIN_TRAINED_VOCABULARY = 258  # ids of two special tokens and 256 bytes
MAX_TRAINED_VOCABULARY = 1 << 20  # ids that fit in memory
MASS_INDEPENDENT_NORMALIZERS = ('none', 'count')  # normalizers that do not depend on the mass of a row
# Fields that only text has a use for.
TEXT_FIELDS = {
    'data': (
        'bos',
        'packing',
        'loss',
        'fixed_position',
        'random_first',
        'share',
        'tokenizer',
        'end_token',
        'fixed_token',
    ),
    'probe': ('prepend', 'inputs', 'domain'),
    'valid': ('domain',),
}
LLAMA3_FIELDS = 'slow', 'fast', 'length'
ROTARY_PATHS = 'model.rotary', 'model.global_layers.rotary'
# {field: (another field, its values that need a number here)}; with other values it must be None.
CONDITIONAL_NUMBERS: dict[str, tuple[str, tuple[str, ...]]] = {
    'model.attention.power': ('model.attention.normalizer', ('p_norm',)),
    'model.learned_kv.value_norm': ('model.learned_kv.value', ('first', 'uniform')),
    **{f'{path}.factor': (f'{path}.scaling', ('linear', 'llama3')) for path in ROTARY_PATHS},
    **{f'{path}.{name}': (f'{path}.scaling', ('llama3',)) for path in ROTARY_PATHS for name in LLAMA3_FIELDS},
    'optimizer.beta2': ('optimizer.name', ('adamw', 'muon', 'orthoadam')),
    'optimizer.epsilon': ('optimizer.name', ('adamw', 'muon', 'orthoadam')),
    'optimizer.final_share': ('optimizer.schedule', ('cosine',)),
    'data.triggers': ('data.task', ('backcopy',)),
}
NORMS_OF_OUTPUTS = ('sandwich', 'res_post')  # placements with a norm after the heads
LEARNED_KV_VALUES = {'k': ('zero', 'first', 'uniform'), 'kv': ('learned',), 'v': ('learned',)}


def parse_config(config: Mapping[str, Any]) -> Spec:
    """Parse a config (nested mapping) into a spec.

    Raises:
        UserError: Fields are unknown, missing or invalid; or, if all fields are valid alone, some contradict each
            other. The message lists every error.
    """
    values = flatten_dict(config, 'config')
    field_types = get_field_types(Spec, 'config.')
    errors = [format_unknown_name(path, path, field_types) for path in values.keys() - field_types.keys()]
    if missing := [path for path in field_types if path not in values]:
        errors.append(f'{format_names(missing)} missing; start from configs/default.py, which has every field')
    for path in field_types.keys() & values.keys():
        try:
            parse_value(path, values[path], field_types[path])
        except UserError as error:
            errors.append(str(error))
    raise_errors(sorted(errors))
    spec = msgspec.convert(config, Spec)
    raise_errors(find_errors(spec))
    return spec


def parse_value(path: str, value: Any, field_type: Any, from_text: bool = False) -> Any:
    """Convert a value to the type of a field; raise UserError if it is not allowed there.

    Args:
        path: The name of the field, for the error message.
        value: The value; of the command line, a text.
        field_type: The type of the field.
        from_text: Whether a text is parsed as the number, flag or None that it says.
    """
    try:
        return msgspec.convert(None if from_text and value == 'None' else value, field_type, strict=not from_text)
    except msgspec.ValidationError:
        if get_origin(field_type) is Literal:
            subject = f'{path} = {value!r}'
            raise UserError(format_unknown_name(subject, str(value), get_args(field_type), 'allowed')) from None
        is_optional = type(None) in get_args(field_type)
        annotated = get_args(field_type)[0] if is_optional else field_type
        allowed = f'{get_args(annotated)[1].description}{", or None" if is_optional else ""}'
        raise UserError(f'{path} is {value!r}; it must be {allowed}') from None


def find_errors(spec: Spec) -> Iterator[str]:
    """Yield error messages about fields that are valid alone but not together."""
    yield from find_conditional_number_errors(spec)
    yield from find_attention_errors(spec.model.attention)
    yield from find_learned_kv_errors(spec.model)
    yield from find_model_errors(spec.model)
    yield from find_mask_errors(spec)
    yield from find_optimizer_errors(spec.optimizer)
    yield from find_data_errors(spec)
    yield from find_probe_errors(spec)
    yield from find_checkpoint_errors(spec.checkpoint)


def find_conditional_number_errors(spec: Spec) -> Iterator[str]:
    for path, (choice_path, choices) in CONDITIONAL_NUMBERS.items():
        value = operator.attrgetter(path)(spec)
        choice = operator.attrgetter(choice_path)(spec)
        if (value is None) == (choice in choices):
            given = f'config.{path} is {value} with {choice_path} {choice}'
            yield f'{given}; it must be a number for {" and ".join(choices)}, and None for others'


def find_attention_errors(attention: AttentionConfig) -> Iterator[str]:
    similarity = attention.similarity
    normalizer = attention.normalizer
    path = 'config.model.attention'
    normalizers = NORMALIZERS_BY_SIMILARITY.get(similarity, ())
    if normalizer not in normalizers:
        allowed = ', '.join(normalizers) or 'none; see NORMALIZERS_BY_SIMILARITY in sinklab/config/spec.py'
        yield f'{path} combines similarity {similarity} with normalizer {normalizer}; {similarity} allows: {allowed}'
    if (similarity, normalizer) == ('identity', 'sum') and attention.feature_map != 'elu1':
        yield (
            f'{path} divides signed scores by their sum, which may be 0; make them positive with '
            f'{path}.feature_map=elu1, or use {path}.normalizer=clamped'
        )
    if attention.gamma > 0 or attention.zeta < 1:
        yield f'{path}.gamma and zeta are {attention.gamma} and {attention.zeta}; give at most 0, and at least 1'
    if (attention.gamma, attention.zeta) != (0, 1) and attention.gain != 1:
        yield f'{path}.gain is {attention.gain} with gamma or zeta, which stretch rows that sum to 1; set it to 1'
    if attention.offset and (similarity, normalizer) in (('exp', 'sum'), ('exp', 'p_norm')):
        yield f'{path}.offset is {attention.offset}, which cancels in exp with {normalizer}; leave it at 0'


def find_learned_kv_errors(model: ModelConfig) -> Iterator[str]:
    learned_kv = model.learned_kv
    attention = model.attention
    path = 'config.model.learned_kv'
    kind, value = learned_kv.kind, learned_kv.value
    if kind in ('none', 'sink_token') and (learned_kv.shared or learned_kv.key_width):
        yield f'{path}.shared and key_width are not used by kind {kind}; omit them, or set kind to k, kv, v or logit'
    values = LEARNED_KV_VALUES.get(kind, ('learned',))
    if value not in values:
        yield f'{path}.value is {value}; kind {kind} allows: {", ".join(values)}'
    if learned_kv.key_width and (kind not in ('k', 'kv') or learned_kv.key_width >= model.head_width):
        given = f'{path}.key_width is {learned_kv.key_width} with kind {kind}'
        yield f'{given}; k and kv use it, below config.model.head_width={model.head_width}; None: all dimensions'
    adds_no_value = kind == 'logit' or (kind == 'k' and value == 'zero')
    if adds_no_value and attention.normalizer in MASS_INDEPENDENT_NORMALIZERS:
        problem = f'adds no value, and normalizer {attention.normalizer} ignores its mass'
        yield f'{path}.kind={kind} {problem}, so it has no effect; use kind kv, or normalizer sum'
    if kind == 'logit' and (attention.feature_map != 'identity' or attention.similarity == 'identity'):
        yield f'{path}.kind=logit needs feature_map identity and another similarity than identity; use kind k'


def find_model_errors(model: ModelConfig) -> Iterator[str]:
    path = 'config.model'
    if model.heads == 1 and (model.learned_kv.shared or model.gate == 'shared'):
        yield f'{path}.heads is 1, so there is nothing to share; set learned_kv.shared=False, or gate=elementwise'
    cancels_gain = model.head_norm or (model.norm in NORMS_OF_OUTPUTS and model.norm_kind != 'dynamic_tanh')
    if model.attention.gain != 1 and cancels_gain:
        given = f'{path}.attention.gain is {model.attention.gain}, which the norm after the heads cancels'
        yield f'{given}; leave it at 1, or set head_norm=False and norm=pre'
    if model.ffn not in FFN_NAMES:
        unknown = format_unknown_name(f'{path}.ffn = {model.ffn!r}', model.ffn, FFN_NAMES, 'allowed')
        yield f'{unknown}; give --metric=FILE with the file that registers it, or import it in Python'
    if model.ffn == 'swiglu' and model.initialization == 'released_even':
        yield f'{path}.initialization=released_even equals released if ffn is swiglu; set it to released'
    if model.position == 'rotary' and model.head_width % 2:
        yield f'{path}.head_width is {model.head_width}; rotary positions need an even number'
    if model.heads % model.num_kv_heads:
        yield f'{path}.kv_heads is {model.kv_heads}, which does not divide {path}.heads={model.heads}'
    if model.combination == 'differential' and model.heads // model.num_kv_heads % 2:
        yield (
            f'{path}.combination=differential subtracts heads with the same key, but {path}.heads={model.heads} has '
            f'{model.num_kv_heads} keys; set {path}.kv_heads so that an even number of heads shares each'
        )
    if model.forget_gate and (model.position == 'alibi' or model.position.startswith('relative')):
        yield f'{path}.forget_gate and {path}.position={model.position} both set the bias; set position to none'
    yield from find_rotary_errors(model.rotary, model.position, path)
    yield from find_global_layers_errors(model)
    if model.position == 'absolute' and model.width % 2:
        yield f'{path}.width is {model.width}; absolute positions need an even number'


def find_rotary_errors(rotary: RotaryConfig, position: str, section: str) -> Iterator[str]:
    path = f'{section}.rotary'
    if rotary.scaling == 'llama3' and rotary.slow and rotary.fast and rotary.slow >= rotary.fast:
        yield f'{path}.slow and fast are {rotary.slow} and {rotary.fast}; slow must be less than fast'
    default = RotaryConfig()
    if position != 'rotary' and (rotary.base, rotary.scaling) != (default.base, default.scaling):
        given = (
            f'{path} has base {rotary.base:g} and scaling {rotary.scaling}, which position {position} does not use'
        )
        yield f'{given}; leave them at {default.base:g} and {default.scaling}'


def find_global_layers_errors(model: ModelConfig) -> Iterator[str]:
    global_layers = model.global_layers
    path = 'config.model.global_layers'
    yield from find_rotary_errors(global_layers.rotary, global_layers.position, path)
    if global_layers.every is None:
        if global_layers != GlobalLayersConfig():
            yield f'{path} is set, but {path}.every is None, so that no layer is global; set it, or omit the rest'
        return
    if not 2 <= global_layers.every <= model.layers:
        yield f'{path}.every is {global_layers.every}; it must be 2 to config.model.layers={model.layers}, or None'
    if model.position != 'rotary':
        yield f'{path}.every needs config.model.position=rotary, which is {model.position}; set it to None'
    elif (model.mask.window, global_layers.position, global_layers.rotary) == (None, 'rotary', model.rotary):
        yield f'{path}: global layers equal the others; set config.model.mask.window, or {path}.position or rotary'


def find_mask_errors(spec: Spec) -> Iterator[str]:
    mask = spec.model.mask
    length = spec.data.length
    path = 'config.model.mask'
    for name in ('prefix', 'window', 'block'):
        value = getattr(mask, name)
        if value and value >= length:
            yield f'{path}.{name} is {value}, but windows have {length} tokens; set it below that, or to None'
        if value == 1:
            yield f'{path}.{name} is 1, and a query sees itself anyway; set it to 2 or more, or to None'
    if mask.prefix and mask.document:
        yield f'{path}.prefix shows the first document to all others; set {path}.document to False, or prefix to None'
    if spec.data.task != 'text' and (mask.document or spec.data.positions == 'reset'):
        yield f'config.data.task={spec.data.task} has no documents; set {path}.document=False and positions=continued'
    if not spec.data.packing and (mask.document or spec.data.positions == 'reset'):
        yield f'config.data.packing=False has one document a window; set {path}.document=False, positions=continued'
    if spec.data.positions == 'reset':
        yield from find_position_reset_errors(spec.model)


def find_position_reset_errors(model: ModelConfig) -> Iterator[str]:
    """Yield error messages about positions that restart at each document."""
    given = f'config.data.positions=reset with position {model.position}'
    if model.position == 'none':
        yield f'{given} has no effect; set it to continued'
    if model.position == 'alibi' or model.position.startswith('relative'):
        yield f'{given} has no distance to another document; set it to continued, and mask.document=True'
    if model.position == 'rotary' and model.mask.document and model.learned_kv.kind != 'sink_token':
        yield f'{given} changes no distance within a document; set it to continued, or position to learned'


def find_optimizer_errors(optimizer: OptimizerConfig) -> Iterator[str]:
    path = 'config.optimizer'
    if optimizer.warmup_steps >= optimizer.steps:
        given = f'{path}.warmup_steps is {optimizer.warmup_steps}, but the run has {optimizer.steps} steps'
        yield f'{given}; lower it, or raise {path}.steps'


def find_data_errors(spec: Spec) -> Iterator[str]:
    data = spec.data
    path = 'config.data'
    if data.task == 'text':
        yield from find_token_errors(data, spec.model)
    for name in ('fixed_position', 'random_last'):
        position = getattr(data, name)
        if position and position > data.length:
            yield f'{path}.{name} is {position}; windows have {data.length} tokens'
    if data.fixed_position is None and not data.fixed_held_out:
        yield f'{path}.fixed_held_out=False has no effect without {path}.fixed_position; leave it at True'
    first, last = data.random_first, data.random_last
    if (first is None) != (last is None) or (first or 0) > (last or 0):
        yield f'{path}.random_first and random_last are {first} and {last}; give both, in this order, or neither'
    if first and last and data.fixed_position and first <= data.fixed_position <= last:
        given = f'{path}.fixed_position is {data.fixed_position}, among the random tokens ({first} to {last})'
        yield f'{given}; set one of them to None'
    if data.triggers and data.triggers > spec.model.vocabulary - 2:
        yield f'{path}.triggers is {data.triggers}; at most config.model.vocabulary - 2 = {spec.model.vocabulary - 2}'
    if data.task == 'backcopy':
        for section, names in TEXT_FIELDS.items():
            for name in names:
                value, default = (getattr(getattr(config, section), name) for config in (spec, Spec()))
                if value != default:
                    yield f'config.{section}.{name} is {value}, which backcopy does not use; leave it at {default}'


def find_token_errors(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    """Yield error messages about the vocabulary and the special tokens of text."""
    end = data.end_token
    fixed = data.fixed_token
    path = 'config.data'
    trains_tokenizer = data.tokenizer == 'train' and not data.source.startswith('store:')
    vocabulary = model.vocabulary
    given = f'{path}.end_token and fixed_token are {end} and {fixed}'
    if trains_tokenizer and not MIN_TRAINED_VOCABULARY <= vocabulary <= MAX_TRAINED_VOCABULARY:
        limits = f'{MIN_TRAINED_VOCABULARY} (two special tokens and 256 bytes) to {MAX_TRAINED_VOCABULARY}'
        yield f'config.model.vocabulary is {vocabulary}; a tokenizer trained here has {limits} ids'
    if end == fixed or max(end, fixed) >= vocabulary:
        yield f'{given}; they must be two ids below config.model.vocabulary={vocabulary}'
    if trains_tokenizer and (end, fixed) != (0, 1):
        yield f'{given}; a tokenizer trained here has the ids 0 and 1'
    if data.loss == 'assistant' and not data.source.startswith(('chat:', 'mixture:', 'store:')):
        yield f'{path}.loss is assistant, and {path}.source={data.source} has no roles; set it to all'


def find_probe_errors(spec: Spec) -> Iterator[str]:
    probe = spec.probe
    data = spec.data
    prefix = spec.model.mask.prefix
    path = 'config.probe'
    if probe.length > data.length:
        yield f'{path}.length is {probe.length}; use at most config.data.length={data.length} tokens'
    if probe.keys > probe.length:
        yield f'{path}.keys is {probe.keys}; a probe sequence has {probe.length} keys'
    if prefix and prefix > probe.keys:
        yield f'{path}.keys is {probe.keys}, fewer than the {prefix} tokens of the prefix; raise it'
    if data.fixed_position and data.fixed_held_out and data.fixed_position > probe.length:
        given = f'config.data.fixed_position is {data.fixed_position}, after the {probe.length} tokens of a probe'
        yield f'{given}; raise {path}.length'
    if probe.prepend == 'eos' and data.fixed_position == 1 and data.fixed_held_out:
        yield f'config.data.fixed_position=1 overwrites {path}.prepend=eos; set one of them to None or none'
    if probe.prepend == 'eos' and (spec.model.mask.document or data.positions == 'reset'):
        yield f'{path}.prepend=eos ends a document before the text, which then does not see it; set it to bos'
    if probe.domain and probe.inputs != 'natural':
        yield f'{path}.domain is {probe.domain}, and {probe.inputs} inputs have no domain; set it to None'


def find_checkpoint_errors(checkpoint: CheckpointConfig) -> Iterator[str]:
    keep_every = checkpoint.keep_every_steps
    save_every = checkpoint.every_steps
    path = 'config.checkpoint'
    if keep_every and (not save_every or keep_every % save_every):
        given = f'{path}.keep_every_steps is {keep_every}, where {path}.every_steps={save_every} saves nothing'
        yield f'{given}; set it to a multiple, or to 0'
