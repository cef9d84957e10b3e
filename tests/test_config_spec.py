"""Types of config fields, and rules between them."""

import functools
import operator

import pytest
from tiny_specs import make_tiny_config, make_tiny_spec

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.errors import UserError


def change_config(changes):
    tree = make_tiny_config().to_dict()
    for path, value in changes.items():
        *parents, field = path.split('.')
        functools.reduce(operator.getitem, parents, tree)[field] = value
    return tree


def get_error(changes):
    """Return the error of a changed config, which is one line."""
    with pytest.raises(UserError) as error:
        parse_config(change_config(changes))
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ('path', 'value', 'allowed'),
    [
        ('model.layers', 0, 'at least 1'),
        ('model.layers', 2**31, 'below 2^31'),
        ('model.layers', 2.0, 'whole number'),
        ('model.layers', True, 'whole number'),
        ('model.layers', None, 'whole number'),
        ('model.tied', 1, 'True or False'),
        ('model.dtype', 'float16', 'bfloat16, float32'),
        ('model.attention.similarity', 'sigmod', 'did you mean sigmoid?'),
        ('optimizer.peak_learning_rate', float('nan'), 'above 0'),
        ('optimizer.peak_learning_rate', float('inf'), 'above 0'),
        ('optimizer.peak_learning_rate', '1e-3', 'above 0'),
        ('optimizer.clip_norm', -1.0, 'or None'),
        ('optimizer.beta2', 1.0, 'below 1'),
        ('data.held_out', 1.0, 'between 0 and 1'),
        ('data.share', 0.0, 'above 0 and at most 1'),
        ('data.source', '', 'not empty'),
        ('seed', -1, '2^32 - 1'),
    ],
)
def test_invalid_value_is_refused_with_allowed_values(path, value, allowed):
    error = get_error({path: value})
    assert error.startswith(f'config.{path} ')
    assert repr(value) in error
    assert allowed in error


def test_missing_field_is_named():
    tree = make_tiny_config().to_dict()
    del tree['probe']['keys']
    with pytest.raises(UserError, match=r'config\.probe\.keys'):
        parse_config(tree)


def test_all_errors_are_listed_in_one_line():
    error = get_error({'model.layers': 0, 'seed': -1, 'probe.inptus': 'natural', 'probe.length': 17})
    assert error.startswith('3 faults')
    assert [path for path in ('model.layers', 'seed') if f'config.{path} is ' not in error] == []
    assert 'config.probe.inptus is unknown; did you mean config.probe.inputs?' in error
    error = get_error({'optimizer.warmup_steps': 99, 'probe.length': 17, 'probe.keys': 18, 'data.random_first': 2})
    assert error.startswith('4 faults')


def test_whole_number_becomes_float():
    clip_norm = parse_config(change_config({'optimizer.clip_norm': 2})).optimizer.clip_norm
    assert (clip_norm, type(clip_norm)) == (2.0, float)


SIGMOID = dict(model__attention__similarity='sigmoid', model__attention__normalizer='none')
KV, K, LOGIT, VALUE = (dict(model__learned_kv__kind=kind) for kind in ('kv', 'k', 'logit', 'v'))
BACKCOPY = dict(data__task='backcopy', data__triggers=3)
GLOBAL = dict(model__global_layers__every=2)
LINEAR = dict(model__rotary__scaling='linear')


@pytest.mark.parametrize(
    ('path', 'changes'),
    [
        ('model.attention', dict(model__attention__similarity='identity')),
        ('model.attention', dict(model__attention__normalizer='none')),
        ('model.attention.power', dict(model__attention__power=2.0)),
        ('model.attention.power', dict(model__attention__normalizer='p_norm')),
        ('model.attention.offset', dict(model__attention__offset=-1.0)),
        ('model.learned_kv.shared', dict(model__learned_kv__shared=True)),
        ('model.learned_kv.value', K),
        ('model.learned_kv.value', KV | dict(model__learned_kv__value='zero')),
        ('model.learned_kv.value', LOGIT | dict(model__learned_kv__value='zero')),
        ('model.learned_kv.value_norm', K | dict(model__learned_kv__value='first')),
        ('model.learned_kv.value_norm', KV | dict(model__learned_kv__value_norm=1.0)),
        ('model.learned_kv.key_width', KV | dict(model__learned_kv__key_width=4)),
        ('model.learned_kv.key_width', VALUE | dict(model__learned_kv__key_width=2)),
        ('model.learned_kv.kind', SIGMOID | K | dict(model__learned_kv__value='zero')),
        ('model.learned_kv.kind', SIGMOID | LOGIT),
        ('model.learned_kv.kind', LOGIT | dict(model__attention__feature_map='mlp')),
        ('model.heads', KV | dict(model__heads=1, model__learned_kv__shared=True)),
        ('model.heads', dict(model__heads=1, model__gate='shared')),
        ('model.attention.gain', dict(model__attention__gain=2.0, model__head_norm=True)),
        ('model.attention.gain', dict(model__attention__gain=2.0, model__norm='sandwich')),
        ('model.attention.gain', dict(model__attention__gain=0.5, model__norm='res_post')),
        ('model.initialization', dict(model__initialization='released_even')),
        ('model.head_width', dict(model__head_width=5)),
        ('model.kv_heads', dict(model__kv_heads=3)),
        ('model.width', dict(model__position='absolute', model__width=15)),
        ('model.rotary.factor', dict(model__rotary__factor=2.0)),
        ('model.rotary.factor', LINEAR),
        ('model.rotary.length', LINEAR | dict(model__rotary__factor=2.0, model__rotary__length=8)),
        ('model.rotary', dict(model__position='alibi', model__rotary__base=5e5)),
        ('model.global_layers.every', dict(model__global_layers__every=1, model__mask__window=4)),
        ('model.global_layers.every', dict(model__global_layers__every=3, model__mask__window=4)),
        ('model.global_layers', GLOBAL),
        ('model.global_layers', dict(model__global_layers__position='none')),
        ('model.global_layers.every', GLOBAL | dict(model__mask__window=4, model__position='alibi')),
        ('model.global_layers.rotary.factor', GLOBAL | dict(model__global_layers__rotary__scaling='linear')),
        (
            'model.global_layers.rotary',
            GLOBAL | dict(model__global_layers__position='none', model__global_layers__rotary__base=5.0),
        ),
        ('model.mask.window', dict(model__mask__window=16)),
        ('model.mask.block', dict(model__mask__block=20)),
        ('model.mask.prefix', dict(model__mask__prefix=1)),
        ('model.mask.window', dict(model__mask__window=1)),
        ('model.mask.prefix', dict(model__mask__prefix=3, model__mask__document=True)),
        ('data.positions', dict(model__position='none', data__positions='reset')),
        ('model.forget_gate', dict(model__position='alibi', model__forget_gate=True)),
        ('data.positions', dict(model__position='alibi', data__positions='reset')),
        ('data.positions', dict(model__mask__document=True, data__positions='reset')),
        ('data.packing', dict(model__mask__document=True, data__packing=False)),
        ('model.vocabulary', dict(model__vocabulary=257)),
        ('probe.length', dict(probe__length=17)),
        ('probe.keys', dict(probe__keys=13)),
        ('probe.keys', dict(model__mask__prefix=4)),
        ('data.fixed_position', dict(data__fixed_position=17, data__fixed_held_out=False)),
        ('data.fixed_position', dict(data__fixed_position=14)),
        ('data.fixed_position', dict(data__fixed_position=1, probe__prepend='eos')),
        ('probe.prepend', dict(model__mask__document=True, probe__prepend='eos')),
        ('optimizer.warmup_steps', dict(optimizer__warmup_steps=8)),
        ('optimizer.final_share', dict(optimizer__schedule='cosine')),
        ('optimizer.final_share', dict(optimizer__final_share=0.1)),
        ('optimizer.beta2', dict(optimizer__name='sgd', optimizer__epsilon=None)),
        ('optimizer.beta2', dict(optimizer__beta2=None)),
        ('data.fixed_held_out', dict(data__fixed_held_out=False)),
        ('data.random_first', dict(data__random_first=2)),
        ('data.random_first', dict(data__random_first=3, data__random_last=2)),
        ('data.random_last', dict(data__random_first=1, data__random_last=17)),
        ('data.fixed_position', dict(data__random_first=1, data__random_last=3, data__fixed_position=2)),
        ('data.triggers', dict(data__triggers=3)),
        ('data.triggers', dict(data__task='backcopy')),
        ('data.triggers', BACKCOPY | dict(data__triggers=299)),
        ('data.bos', BACKCOPY | dict(data__bos='documents')),
        ('data.task', BACKCOPY | dict(model__mask__document=True)),
        ('probe.prepend', BACKCOPY | dict(probe__prepend='bos')),
        ('valid.domain', BACKCOPY | dict(valid__domain='code')),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_conflicting_fields_are_refused_in_one_line_about_one_field(path, changes):
    with pytest.raises(UserError) as error:
        make_tiny_spec(**changes)
    assert str(error.value).startswith(f'config.{path}')
    assert '\n' not in str(error.value)


def test_default_config_file_has_defaults_of_schema():
    assert parse_config(default.get_config().to_dict()) == Spec()
