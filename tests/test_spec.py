import pytest
from conftest import tiny_config

from sinklab.spec import Refusal, parse


def changed(path, value):
    tree = tiny_config().to_dict()
    *parents, last = path.split('.')
    at = tree
    for name in parents:
        at = at[name]
    at[last] = value
    return tree


@pytest.mark.parametrize(
    ('path', 'value', 'words'),
    [
        ('optimizer.peak_learning_rat', 1e-3, 'did you mean peak_learning_rate?'),
        ('optimizer.momentum', 0.9, 'fields here: name, peak_learning_rate'),
        ('optimzer', {}, 'config.optimzer is unknown; did you mean optimizer?'),
        ('model', 3, 'it must hold the fields layers'),
        ('model.layers', 0, 'config.model.layers is 0; it must be a whole number of at least 1'),
        ('model.layers', 2.0, 'whole number'),
        ('model.layers', True, 'whole number'),
        ('model.layers', None, 'whole number'),
        ('model.dtype', 'float16', 'allowed: bfloat16, float32'),
        ('model.attention.similarity', 'sigmod', 'did you mean sigmoid?'),
        ('model.attention.normalizer', 'none', 'exp goes with: sum'),
        ('model.head_width', 5, 'even'),
        ('model.vocabulary', 257, 'at least 258 ids'),
        ('optimizer.peak_learning_rate', float('nan'), 'finite number above 0'),
        ('optimizer.peak_learning_rate', '1e-3', 'finite number above 0'),
        ('optimizer.beta2', 1.0, 'from 0 up to, but not, 1'),
        ('optimizer.warmup_steps', 8, 'warm up for fewer'),
        ('optimizer.schedule', 'cosine', 'cosine needs one'),
        ('optimizer.final_learning_rate', 1e-4, 'constant has no use for it'),
        ('data.held_out', 1.0, 'between 0 and 1'),
        ('data.source', '', 'not empty'),
        ('data.fixed_position', 17, 'windows have 16 places'),
        ('probe.length', 17, 'longer than a window'),
        ('probe.keys', 13, '12 keys'),
        ('seed', -1, 'from 0 to 2^32 - 1'),
    ],
)
def test_what_cannot_be_is_refused_in_words_that_name_it(path, value, words):
    with pytest.raises(Refusal) as refusal:
        parse(changed(path, value))
    assert words in str(refusal.value)
    assert '\n' not in str(refusal.value)


def test_a_missing_field_is_named():
    tree = tiny_config().to_dict()
    del tree['probe']['keys']
    with pytest.raises(Refusal, match=r'config\.probe\.keys is missing'):
        parse(tree)


def test_a_whole_number_stands_for_a_float():
    assert parse(changed('optimizer.clip_norm', 2)).optimizer.clip_norm == 2.0


def test_a_cosine_may_not_end_above_its_peak():
    tree = changed('optimizer.schedule', 'cosine')
    tree['optimizer']['final_learning_rate'] = 1.0
    with pytest.raises(Refusal, match='at most the peak'):
        parse(tree)
