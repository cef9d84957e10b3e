import pytest
from conftest import make_tiny_config, make_tiny_spec

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.errors import UserError

UNNORMALIZED = dict(model__attention__similarity='sigmoid', model__attention__normalizer='none')


def change_config(path, value):
    tree = make_tiny_config().to_dict()
    *parents, field = path.split('.')
    node = tree
    for name in parents:
        node = node[name]
    node[field] = value
    return tree


@pytest.mark.parametrize(
    ('path', 'value', 'message'),
    [
        ('optimizer.peak_learning_rat', 1e-3, 'did you mean peak_learning_rate?'),
        ('optimizer.momentum', 0.9, 'fields here: name, peak_learning_rate'),
        ('optimzer', {}, 'config.optimzer is unknown; did you mean optimizer?'),
        ('model', 3, 'it must have the fields layers'),
        ('model.layers', 0, 'config.model.layers is 0; it must be a whole number of at least 1'),
        ('model.layers', 2.0, 'whole number'),
        ('model.layers', True, 'whole number'),
        ('model.layers', None, 'whole number'),
        ('model.dtype', 'float16', 'allowed: bfloat16, float32'),
        ('model.attention.similarity', 'sigmod', 'did you mean sigmoid?'),
        ('model.attention.normalizer', 'none', 'exp allows: sum'),
        ('model.head_width', 5, 'even'),
        ('model.vocabulary', 257, 'at least 258 ids'),
        ('optimizer.peak_learning_rate', float('nan'), 'finite number above 0'),
        ('optimizer.peak_learning_rate', '1e-3', 'finite number above 0'),
        ('optimizer.beta2', 1.0, 'of at least 0 and below 1'),
        ('optimizer.warmup_steps', 8, '8 steps; lower it'),
        ('optimizer.schedule', 'cosine', 'it must be a number for cosine, and None for constant'),
        ('optimizer.final_share', 0.1, 'final_share is 0.1 with schedule constant; it must be a number for cosine'),
        ('data.held_out', 1.0, 'between 0 and 1'),
        ('data.source', '', 'not empty'),
        ('data.fixed_position', 17, 'windows have 16 tokens'),
        ('probe.length', 17, 'longer than a window'),
        ('probe.keys', 13, '12 keys'),
        ('seed', -1, 'from 0 to 2^32 - 1'),
    ],
)
def test_parse_config_rejects_invalid_value_by_name(path, value, message):
    with pytest.raises(UserError) as error:
        parse_config(change_config(path, value))
    assert message in str(error.value)
    assert '\n' not in str(error.value)


def test_parse_config_reports_all_field_errors_before_conflicts():
    tree = change_config('model.layers', 0)
    tree['seed'], tree['probe']['inptus'] = -1, 'natural'
    with pytest.raises(UserError) as error:
        parse_config(tree)
    messages = ('3 faults', 'config.model.layers is 0', 'config.seed is -1', 'config.probe.inptus is unknown')
    assert [message for message in messages if message not in str(error.value)] == []
    tree = change_config('optimizer.warmup_steps', 99)
    tree['probe'] |= dict(length=17, keys=18)
    tree['data'] |= dict(random_first=2, fixed_position=3)
    tree['model']['rotary'] |= dict(scaling='llama3', slow=4.0)
    with pytest.raises(UserError) as error:
        parse_config(tree)
    messages = ('warmup_steps is 99', 'length is 17', 'keys is 18', 'random_first and random_last', 'factor', 'fast')
    assert [message for message in messages if message not in str(error.value)] == []
    assert '\n' not in str(error.value)


def test_parse_config_names_missing_field():
    tree = make_tiny_config().to_dict()
    del tree['probe']['keys']
    with pytest.raises(UserError, match=r'config\.probe\.keys'):
        parse_config(tree)


def test_parse_config_converts_integer_to_float():
    assert parse_config(change_config('optimizer.clip_norm', 2)).optimizer.clip_norm == 2.0


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            dict(model__attention__similarity='identity'),
            'make them positive with config.model.attention.feature_map=elu1',
        ),
        (dict(model__attention__power=2.0), 'power is 2.0 with normalizer sum'),
        (dict(model__attention__normalizer='p_norm'), 'p_norm needs a power'),
        (dict(model__attention__offset=-1.0), 'cancels'),
        (dict(model__columns__shared=True), 'or set kind to k, kv'),
        (dict(model__columns__kind='k'), 'kind k allows: zero, first, uniform'),
        (dict(model__columns__kind='kv', model__columns__value='zero'), 'kind kv allows: learned'),
        (dict(model__columns__kind='logit', model__columns__value='zero'), 'leave it at learned'),
        (dict(model__columns__kind='k', model__columns__value='first'), 'first and uniform need a number'),
        (dict(model__columns__kind='kv', model__columns__value_norm=1.0), 'value_norm is 1.0 with value learned'),
        (dict(model__columns__kind='kv', model__columns__key_width=4), 'below head_width'),
        (dict(model__columns__kind='v', model__columns__key_width=2), 'k and kv use it'),
        (
            UNNORMALIZED | dict(model__columns__kind='k', model__columns__value='zero'),
            'use kind kv, or normalizer sum',
        ),
        (UNNORMALIZED | dict(model__columns__kind='logit'), 'has no effect'),
        (dict(model__columns__kind='logit', model__attention__feature_map='mlp'), 'use kind k instead'),
        (dict(model__kv_heads=3), 'kv_heads is 3, which does not divide config.model.heads=4'),
        (dict(model__rotary__factor=2.0), 'it must be a number for linear and llama3 and yarn, and None for others'),
        (dict(model__rotary__attention_factor=2.0), 'it must be a number for yarn, and None for others'),
        (dict(model__qk_norm_joint=True), 'qk_norm_joint has no effect'),
        (dict(model__norm='res_post', model__attention__gain=0.5), 'which the norm after the heads cancels'),
        (dict(model__global_layers__every=1), 'every is 1; it must be 2 to config.model.layers=2'),
        (dict(model__global_layers__every=3, model__mask__window=4), 'every is 3; it must be 2 to'),
        (dict(model__global_layers__every=2), 'global layers equal the others'),
        (dict(model__global_layers__position='none'), 'every is None, so that no layer is global'),
        (
            dict(model__global_layers__every=2, model__mask__window=4, model__position='alibi'),
            'every needs config.model.position=rotary, which is alibi',
        ),
        (
            dict(model__global_layers__every=2, model__global_layers__rotary__scaling='linear'),
            'config.model.global_layers.rotary.factor is None with scaling linear',
        ),
        (
            dict(
                model__global_layers__every=2,
                model__global_layers__position='none',
                model__global_layers__rotary__base=5.0,
            ),
            'config.model.global_layers.rotary has base 5 and scaling none, which position none does not use',
        ),
        (dict(model__rotary__scaling='linear'), 'factor is None with scaling linear'),
        (
            dict(model__rotary__scaling='linear', model__rotary__factor=2.0, model__rotary__length=8),
            'it must be a number for llama3',
        ),
        (dict(model__position='alibi', model__rotary__base=5e5), 'which position alibi does not use'),
        (dict(model__position='absolute', model__width=15), 'absolute positions need an even number'),
        (dict(model__mask__window=16), 'windows have 16 tokens'),
        (dict(model__mask__block=20), 'windows have 16 tokens'),
        (dict(model__mask__prefix=1), 'every query already sees'),
        (dict(model__mask__window=1), 'sees only itself'),
        (dict(model__mask__prefix=3, model__mask__document=True), 'shows the first document to all others'),
        (dict(model__position='none', data__positions='reset'), 'with position none has no effect'),
        (dict(model__position='alibi', data__positions='reset'), 'has no distance to another document'),
        (dict(model__mask__document=True, data__positions='reset'), 'changes no distance within a document'),
        (dict(model__heads=1, model__columns__kind='kv', model__columns__shared=True), 'nothing to share'),
        (dict(model__heads=1, model__gate='shared'), 'nothing to share'),
        (dict(model__attention__gain=2.0, model__head_norm=True), 'cancels'),
        (dict(model__attention__gain=2.0, model__norm='sandwich'), 'cancels'),
        (dict(model__initialization='released_even'), 'equals released if ffn is swiglu'),
        (dict(model__mask__prefix=4), 'fewer than the 4 tokens of the prefix'),
        (dict(data__fixed_position=14), 'after the 12 tokens of a probe'),
        (dict(data__fixed_position=1, probe__prepend='eos'), 'overwrites config.probe.prepend=eos'),
        (dict(model__mask__document=True, probe__prepend='eos'), 'ends a document before the text'),
        (
            dict(optimizer__name='sgd'),
            'beta2 is 0.95 with name sgd; it must be a number for adamw and muon, and None for sgd',
        ),
        (dict(optimizer__beta2=None), 'beta2 is None with name adamw; it must be a number for adamw and muon'),
        (dict(data__fixed_held_out=False), 'has no effect without config.data.fixed_position'),
        (dict(data__random_first=2), 'give both'),
        (dict(data__random_first=3, data__random_last=2), 'in this order'),
        (dict(data__random_first=1, data__random_last=17), 'windows have 16 tokens'),
        (dict(data__random_first=1, data__random_last=3, data__fixed_position=2), 'among the random tokens'),
        (dict(data__share=0.0), 'above 0 and at most 1'),
        (dict(data__triggers=3), 'text needs None'),
        (dict(data__task='backcopy'), 'backcopy needs a number'),
        (dict(data__task='backcopy', data__triggers=299), 'at most 298 are possible'),
        (dict(data__task='backcopy', data__triggers=3, data__bos='documents'), 'backcopy does not use'),
        (dict(data__task='backcopy', data__triggers=3, model__mask__document=True), 'has no documents'),
        (dict(data__task='backcopy', data__triggers=3, probe__prepend='bos'), 'backcopy does not use'),
        (dict(data__task='backcopy', data__triggers=3, valid__domain='code'), 'config.valid.domain is code, which'),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else None,
)
def test_parse_config_rejects_conflicting_fields(changes, message):
    with pytest.raises(UserError) as error:
        make_tiny_spec(**changes)
    assert message in str(error.value)
    assert '\n' not in str(error.value)


def test_default_config_file_has_defaults_of_schema():
    assert parse_config(default.get_config().to_dict()) == Spec()
