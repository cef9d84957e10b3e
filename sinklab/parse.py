"""A config, parsed once into a spec: field by field, then the rules between fields."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.record import record, refuse_all
from sinklab.spec import HYPERPARAMETERS, LATER, PAIRS, Attention, Checkpoint, Data, Model, Optimizer, Spec

SMALLEST_TRAINED, LARGEST_TRAINED = 258, 1 << 20  # ids: two special ones and the bytes; what fits in memory
UNMEASURED = ('none', 'count')  # normalizers that do not look at the mass of a row
# What each scaling of rotary positions has use for.
SCALED = {'linear': ('factor',), 'llama3': ('factor', 'slow', 'fast', 'length')}
VALUES = {'k': ('zero', 'first', 'uniform'), 'kv': ('learned',), 'v': ('learned',)}


def parse(config: Mapping[str, Any]) -> Spec:
    """Read the spec that a config (nested mapping) describes.

    Raises:
        Refusal: a field is not as its type says; or, if all are, fields do not go together. It names every fault.
    """
    spec = record(Spec, config, 'config')
    refuse_all(refusals(spec))
    return spec


def refusals(spec: Spec) -> Iterator[str]:
    """What each field allows and the fields together do not."""
    yield from of_attention(spec.model.attention)
    yield from of_columns(spec.model)
    yield from of_model(spec.model)
    yield from of_masks(spec)
    yield from of_optimizer(spec.optimizer)
    yield from of_data(spec.data, spec.model)
    yield from of_probe(spec)
    yield from of_checkpoint(spec.checkpoint)


def of_attention(attention: Attention) -> Iterator[str]:
    similarity, normalizer, at = attention.similarity, attention.normalizer, 'config.model.attention'
    pairs = PAIRS.get(similarity, ())
    if normalizer not in pairs:
        yield (
            f'{at} pairs similarity {similarity} with normalizer {normalizer}, which means nothing; {similarity} '
            f'goes with: {", ".join(pairs) or "nothing; it has no line in PAIRS of sinklab/spec.py"}'
        )
    if (similarity, normalizer) == ('identity', 'sum') and attention.feature_map != 'elu1':
        yield (
            f'{at} divides signed scores by their sum, which may be 0; make them positive with '
            f'{at}.feature_map=elu1, or use {at}.normalizer=clamped'
        )
    if (normalizer == 'p_norm') != (attention.power is not None):
        yield (
            f'{at}.power is {attention.power} with normalizer {normalizer}; p_norm needs a power, and the others '
            'have no use for one (None)'
        )
    if attention.offset and (similarity, normalizer) in (('exp', 'sum'), ('exp', 'p_norm')):
        yield f'{at}.offset is {attention.offset}, which exp with {normalizer} divides out again; leave it at 0'


def of_columns(model: Model) -> Iterator[str]:
    columns, attention, at = model.columns, model.attention, 'config.model.columns'
    kind, value = columns.kind, columns.value
    if kind in ('none', 'sink_token') and (columns.shared or columns.key_width):
        yield f'{at}.shared and key_width have no use in kind {kind}; leave them, or set kind to k, kv, v or logit'
    if kind in VALUES and value not in VALUES[kind]:
        yield f'{at}.value is {value}; kind {kind} allows: {", ".join(VALUES[kind])}'
    if kind not in VALUES and value != 'learned':
        yield f'{at}.value is {value}, for which kind {kind} has no use; leave it at learned'
    if (value in ('first', 'uniform')) != (columns.value_norm is not None):
        yield f'{at}.value_norm is {columns.value_norm} with value {value}; first and uniform need one, others None'
    if columns.key_width and (kind not in ('k', 'kv') or columns.key_width >= model.head_width):
        yield (
            f'{at}.key_width is {columns.key_width} with kind {kind} and head_width {model.head_width}; it is for '
            'k and kv, and below the head width (None: all dimensions)'
        )
    empty = kind == 'logit' or (kind == 'k' and value == 'zero')
    if empty and attention.normalizer in UNMEASURED:
        yield (
            f'{at}.kind={kind} adds no value, and normalizer {attention.normalizer} has no use for its mass, so it '
            'changes nothing; use kind kv, or normalizer sum'
        )
    if kind == 'logit' and (attention.feature_map != 'identity' or attention.similarity == 'identity'):
        yield (
            f'{at}.kind=logit is a score of its own, beside feature map identity and a similarity that weighs '
            'scores; use kind k here'
        )


def of_model(model: Model) -> Iterator[str]:
    if model.heads == 1 and (model.columns.shared or model.gate == 'shared'):
        yield 'config.model.heads is 1, so there is nothing to share; set columns.shared=False, or gate=elementwise'
    if model.attention.gain != 1 and (model.head_norm or model.norm == 'sandwich'):
        yield (
            f'config.model.attention.gain is {model.attention.gain}, and a norm of what heads give divides it out '
            'again; leave it at 1, or set head_norm=False and norm=pre'
        )
    if model.ffn == 'swiglu' and model.initialization == 'released_even':
        yield 'config.model.initialization=released_even is released where the ffn is swiglu; set it to released'
    if model.position == 'rotary' and model.head_width % 2:
        yield f'config.model.head_width is {model.head_width}; rotary positions need an even one'
    if model.heads % model.groups:
        yield f'config.model.kv_heads is {model.kv_heads}, which does not divide config.model.heads={model.heads}'
    yield from of_rotary(model)
    if model.position == 'absolute' and model.width % 2:
        yield f'config.model.width is {model.width}; absolute positions need an even one'


def of_rotary(model: Model) -> Iterator[str]:
    rotary, at = model.rotary, 'config.model.rotary'
    for name in ('factor', 'slow', 'fast', 'length'):
        users = [kind for kind, used in SCALED.items() if name in used]
        if (getattr(rotary, name) is None) == (rotary.scaling in users):
            given = f'{at}.{name} is {getattr(rotary, name)} with scaling {rotary.scaling}'
            yield f'{given}; it is a number for {" and ".join(users)}, and None for others'
    if rotary.scaling == 'llama3' and rotary.slow and rotary.fast and rotary.slow >= rotary.fast:
        yield f'{at}.slow and fast are {rotary.slow} and {rotary.fast}; what turns slowly turns less often'
    usual = LATER['model']['rotary']
    if model.position != 'rotary' and (rotary.base, rotary.scaling) != (usual['base'], usual['scaling']):
        yield (
            f'{at} has base {rotary.base:g} and scaling {rotary.scaling}, for which position {model.position} has no '
            f'use; leave them at {usual["base"]:g} and {usual["scaling"]}'
        )


def of_masks(spec: Spec) -> Iterator[str]:
    mask, length, at = spec.model.mask, spec.data.length, 'config.model.mask'
    for name in ('prefix', 'window', 'block'):
        given = getattr(mask, name)
        if given and given >= length:
            yield f'{at}.{name} is {given}, but windows have {length} tokens; below that, or None'
    for name in ('window', 'block'):
        if getattr(mask, name) == 1:
            yield f'{at}.{name} is 1, so that every query sees itself alone; 2 or more, or None'
    if mask.prefix == 1:
        yield f'{at}.prefix is 1, which every query sees already; 2 or more, or None'
    if mask.prefix and mask.document:
        yield f'{at}.prefix shows the first document to all others; set {at}.document to False, or prefix to None'
    if spec.data.task != 'text' and (mask.document or spec.data.positions == 'reset'):
        yield f'config.data.task={spec.data.task} has no documents; set {at}.document=False and positions=continued'
    if spec.data.positions == 'reset':
        yield from of_reset(spec.model)


def of_reset(model: Model) -> Iterator[str]:
    """Positions that begin anew where a document does."""
    told = f'config.data.positions=reset with position {model.position}'
    if model.position == 'none':
        yield f'{told} does nothing; set it to continued'
    if model.position == 'alibi' or model.position.startswith('relative'):
        yield f'{told} has no distance to another document; set it to continued, and mask.document=True'
    if model.position == 'rotary' and model.mask.document and model.columns.kind != 'sink_token':
        yield f'{told} changes no distance within a document; set it to continued, or position to learned'


def of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    at = 'config.optimizer'
    if optimizer.warmup_steps >= optimizer.steps:
        yield (
            f'{at}.warmup_steps is {optimizer.warmup_steps}, but the run has {optimizer.steps} '
            f'steps; warm up for fewer, or raise {at}.steps'
        )
    for menu, uses in HYPERPARAMETERS.items():
        chosen = getattr(optimizer, menu)
        for name in dict.fromkeys(name for names in uses.values() for name in names):
            value, users = getattr(optimizer, name), [user for user in uses if name in uses[user]]
            if (value is None) == (chosen in users):
                some, others = ' and '.join(users), ' and '.join(user for user in uses if user not in users)
                given = f'{at}.{name} is {value} with {menu} {chosen}'
                yield f'{given}; it is a number for {some}, and None for {others}'


def of_data(data: Data, model: Model) -> Iterator[str]:
    at = 'config.data'
    made = data.tokenizer == 'train' and not data.source.startswith('store:')
    if data.task == 'text' and made and not SMALLEST_TRAINED <= model.vocabulary <= LARGEST_TRAINED:
        yield (
            f'config.model.vocabulary is {model.vocabulary}; a tokenizer trained here has at least '
            f'{SMALLEST_TRAINED} ids, two special ones and the bytes, and at most {LARGEST_TRAINED}'
        )
    if data.task == 'text':
        yield from of_special_tokens(data, model)
    for name in ('fixed_position', 'random_last'):
        place = getattr(data, name)
        if place and place > data.length:
            yield f'{at}.{name} is {place}; windows have {data.length} places'
    if data.fixed_position is None and not data.fixed_held_out:
        yield f'{at}.fixed_held_out=False does nothing without {at}.fixed_position; leave it at True'
    first, last = data.random_first, data.random_last
    if (first is None) != (last is None) or (first or 0) > (last or 0):
        yield f'{at}.random_first and random_last are {first} and {last}; give both, in this order, or neither'
    if first and last and data.fixed_position and first <= data.fixed_position <= last:
        yield (
            f'{at}.fixed_position is {data.fixed_position}, among the random ones ({first} to {last}); '
            'set one of them to None'
        )
    if (data.task == 'backcopy') != (data.triggers is not None):
        yield f'{at}.triggers is {data.triggers} with task {data.task}; backcopy needs it, text has no use for it'
    if data.triggers and data.triggers > model.vocabulary - 2:
        yield f'{at}.triggers is {data.triggers}; with {model.vocabulary} ids, at most {model.vocabulary - 2} can be'
    if data.task == 'backcopy':
        plain = dict(bos='none', loss='all', fixed_position=None, random_first=None, share=1.0)
        plain |= dict(tokenizer='train', end_token=0, fixed_token=1)
        for name, value in plain.items():
            if getattr(data, name) != value:
                yield f'{at}.{name} is {getattr(data, name)}, for which backcopy has no use; leave it at {value}'


def of_special_tokens(data: Data, model: Model) -> Iterator[str]:
    ids, at = (data.end_token, data.fixed_token), 'config.data.end_token and fixed_token'
    if data.end_token == data.fixed_token or max(ids) >= model.vocabulary:
        yield f'{at} are {ids[0]} and {ids[1]}; they must be two ids below config.model.vocabulary={model.vocabulary}'
    if data.tokenizer == 'train' and not data.source.startswith('store:') and ids != (0, 1):
        yield f'{at} are {ids[0]} and {ids[1]}; a tokenizer trained here has them at 0 and 1'
    if data.loss == 'assistant' and not data.source.startswith(('chat:', 'mixture:', 'store:')):
        yield f'config.data.loss is assistant, and config.data.source={data.source} tells nobody apart; set it to all'


def of_probe(spec: Spec) -> Iterator[str]:
    probe, data = spec.probe, spec.data
    if probe.length > data.length:
        yield (
            f'config.probe.length is {probe.length}, longer than a window (config.data.length is '
            f'{data.length}); probe at most that many tokens'
        )
    if probe.keys > probe.length:
        yield f'config.probe.keys is {probe.keys}; a probe sequence has {probe.length} keys'
    if spec.model.mask.prefix and spec.model.mask.prefix > probe.keys:
        yield f'config.probe.keys is {probe.keys}, fewer than the {spec.model.mask.prefix} of the prefix; raise it'
    if data.fixed_position and data.fixed_held_out and data.fixed_position > probe.length:
        yield (
            f'config.data.fixed_position is {data.fixed_position}, after the {probe.length} tokens of a probe; '
            'raise config.probe.length'
        )
    if probe.prepend == 'eos' and data.fixed_position == 1 and data.fixed_held_out:
        yield 'config.data.fixed_position=1 overwrites config.probe.prepend=eos; set one of them to None or none'
    if probe.prepend == 'eos' and (spec.model.mask.document or data.positions == 'reset'):
        yield 'config.probe.prepend=eos ends a document before the text, which then does not see it; set it to bos'
    if probe.domain and probe.inputs != 'natural':
        yield f'config.probe.domain is {probe.domain}, and {probe.inputs} inputs are of none; set it to None'
    of_text = {'probe.prepend': 'none', 'probe.inputs': 'natural', 'probe.domain': None, 'valid.domain': None}
    for name, plain in of_text.items():
        given = operator.attrgetter(name)(spec)
        if data.task != 'text' and given != plain:
            yield f'config.{name} is {given}, for which {data.task} has no use; leave it at {plain}'


def of_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    kept, every, at = checkpoint.keep_every_steps, checkpoint.every_steps, 'config.checkpoint'
    if kept and (not every or kept % every):
        yield (
            f'{at}.keep_every_steps is {kept}, and {at}.every_steps={every} saves none at some of these steps; '
            'make it a multiple, or 0'
        )
