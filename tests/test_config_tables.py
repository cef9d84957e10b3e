"""Rows of config files: validity, uniqueness, sources and scaling."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from rows import PAPER_MODULES, ROWS, get_name

from sinklab.config import spec
from sinklab.config.validate import parse_config
from sinklab.configs import default, quickstart
from sinklab.configs.hypotheses import NATURAL, NATURAL_ROWS
from sinklab.configs.sizes import SIZES
from sinklab.configs.table import (
    find_closest_name,
    get_field,
    list_fields,
    scale,
    scale_number,
    scale_with_size,
    table,
)

ROOT = Path(__file__).parents[1]
SIZE_DEPENDENT_FIELD = 'data.fixed_position'  # rows may set it to its default, in case a size changes it
# {row of hypotheses.py: fields that it may set to their defaults, because sizes change them}
FIELDS_AT_DEFAULT = {
    'decay_0.1': frozenset({'optimizer.weight_decay'}),
    **dict.fromkeys(NATURAL_ROWS, frozenset(NATURAL)),
}


@pytest.mark.parametrize(('module', 'row'), ROWS, ids=get_name)
def test_row_config_parses_at_every_size(module, row):
    for size in module.get_config.sizes:
        parse_config(module.get_config(row, size).to_dict())


@pytest.mark.parametrize(('module', 'row'), ROWS, ids=get_name)
def test_row_has_source_and_published_numbers_or_note(module, row):
    entry = module.ROWS[row]
    assert {'diff', 'published', 'source'} <= set(entry) <= {'diff', 'published', 'source', 'note'}
    assert entry['source']
    assert entry['published'] or entry['note']
    assert entry.get('note', '-')


@pytest.mark.parametrize('module', PAPER_MODULES, ids=get_name)
def test_rows_of_table_are_distinct_with_at_most_one_baseline(module):
    specs = {parse_config(module.get_config(row, 'paper').to_dict()): row for row in module.ROWS}
    assert list(specs.values()) == list(module.ROWS)
    assert sum(not row['diff'] for row in module.ROWS.values()) <= 1


@pytest.mark.parametrize('module', PAPER_MODULES, ids=get_name)
def test_row_diff_changes_known_fields(module):
    plain_config = table({'plain': dict(diff={})}, getattr(module, 'BASE', None))('plain')
    for row, entry in module.ROWS.items():
        assert set(entry['diff']) <= set(list_fields(plain_config))
        config = module.get_config(row, 'paper')
        unchanged_paths = [path for path in entry['diff'] if get_field(config, path) == get_field(plain_config, path)]
        assert set(unchanged_paths) <= {SIZE_DEPENDENT_FIELD} | (
            FIELDS_AT_DEFAULT.get(row, set()) if get_name(module) == 'hypotheses' else set()
        ), row


def test_quickstart_reuses_rows_of_other_tables_at_quickstart_size():
    paper_entries = [entry for module in PAPER_MODULES for entry in module.ROWS.values()]
    for row, entry in quickstart.ROWS.items():
        assert any(entry is paper_entry for paper_entry in paper_entries), row
        assert quickstart.get_config(row) == quickstart.get_config(row, 'quickstart')


@pytest.mark.parametrize(
    ('value', 'paper_reference', 'size_reference', 'expected'),
    [
        (8e-4, 4e-4, 2e-2, 4e-2),
        (0.5, 0.1, 0.5, 2.5),
        (0.0, 0.1, 0.5, 0.0),
        (40_000, 20_000, 1500, 3000),
        (10_000, 20_000, 1500, 750),
        (128, 512, 32, 8),
        (128, 512, 4, 1),
        (32, 2048, 16, 1),  # at least 1
        (16, 96, 16, 3),  # below 3: the nearest integer
        (32, 96, 16, 6),  # from 3 on: the nearest even integer
        (2048, 768, 64, 170),
        (3, 1, 1, 3),
        (2, None, 1, 2),
        (2, None, None, 2),
        (0.1, None, 0.1, 0.1),
        (None, 0.95, 0.9, None),
        ('post', 'pre', 'sandwich', 'post'),
        (True, False, True, True),
        (5, 0, 4, 5),
        (0, 2000, 1, 0),
        (500, 1000, 0, 0),
    ],
)
def test_scale_number_keeps_ratio_to_paper_baseline(value, paper_reference, size_reference, expected):
    assert scale_number(value, paper_reference, size_reference) == pytest.approx(expected)
    assert type(scale_number(value, paper_reference, size_reference)) is type(value)


def test_scale_multiplies_value_of_selected_size():
    rows = {
        'decay': dict(diff=scale('optimizer.weight_decay', 3)),
        'steps': dict(diff=scale('optimizer.steps', 3) | {'model.layers': 2}),
        'fewer': dict(diff=scale('optimizer.warmup_steps', 0.001)),
        'none': dict(diff=scale('optimizer.warmup_steps', 0)),
        'often': dict(diff=scale('valid.every_steps', 2)),
        'window': dict(diff=scale('model.mask.window', 1 / 4, of='data.length')),
    }
    get_config = table(rows)
    for size, decay, steps in (('paper', 0.3, 60_000), ('quickstart', 1.5, 4500), ('smoke', 0.3, 12)):
        assert get_config('decay', size).optimizer.weight_decay == pytest.approx(decay)
        assert get_config('steps', size).optimizer.steps == steps
        assert get_config('steps', size).model.layers == 2
        assert get_config('fewer', size).optimizer.warmup_steps == 1
        assert get_config('none', size).optimizer.warmup_steps == 0
    assert get_config('often', 'smoke').valid.every_steps == 0
    assert [get_config('window', size).model.mask.window for size in SIZES] == [512, 16, 64, 4]


@pytest.mark.parametrize(
    ('diff', 'expected_texts'),
    [
        (scale('model.mask.window', 2), ['model.mask.window', 'None', 'of=']),
        (scale('model.tied', 2), ['model.tied', 'False']),
        (scale('model.mask.window', 2, of='data.lenght'), ['data.lenght', 'data.length']),
        (scale('optimizer.stps', 2), ['optimizer.stps', 'optimizer.steps']),
        ({'optimizer.weight_decay': scale('optimizer.weight_decay', 3)}, ['optimizer.weight_decay']),
    ],
)
def test_scale_rejects_unscalable_field_by_name(diff, expected_texts):
    with pytest.raises(ValueError, match=re.escape(expected_texts[0])) as error:
        table({'a': dict(diff=diff)})('a')
    assert [text for text in expected_texts if text not in str(error.value)] == []


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('model.attention.heads', 'model.heads'),
        ('optimizer.stps', 'optimizer.steps'),
        ('optimizer.learning_rate', 'optimizer.peak_learning_rate'),
        ('model.attention.window', 'model.mask.window'),
        ('data.steps', 'optimizer.steps'),
        ('weight_decay', 'optimizer.weight_decay'),
        ('model.atention.gain', 'model.attention.gain'),
        ('valid.every_step', 'valid.every_steps'),
        ('nothing.like_it', None),
    ],
)
def test_find_closest_name_matches_full_path_or_last_component(name, expected):
    assert find_closest_name(name, list(list_fields(default.get_config()))) == expected


def test_scale_with_size_scales_field_with_its_reference_field():
    small_sizes = {'paper': {}, 'small': {'data.length': 128, 'model.head_width': 24, 'optimizer.steps': 200}}
    rows = {
        'window': dict(diff=scale_with_size({'model.mask.window': 512})),
        'block': dict(diff=scale_with_size({'model.mask.block': 64})),
        'width': dict(diff=scale_with_size({'model.learned_kv.key_width': 32, 'optimizer.steps': 40_000})),
        'prefix': dict(diff=scale_with_size({'model.mask.prefix': 10})),
    }
    get_config = table(rows, {'optimizer.steps': 10_000}, small_sizes)
    assert get_config('window', 'small').model.mask.window == 32
    assert get_config('block', 'small').model.mask.block == 4
    assert get_config('width', 'small').model.learned_kv.key_width == 8
    assert get_config('width', 'small').optimizer.steps == 800
    assert get_config('prefix', 'small').model.mask.prefix == 10
    assert get_config('width').optimizer.steps == 40_000
    assert get_config('window').optimizer.steps == 10_000


def list_choices(record, field):
    return set(get_args(get_type_hints(record)[field]))


def test_every_choice_has_implementation():
    from sinklab.attn.backends import BACKENDS
    from sinklab.attn.operations import NORMALIZERS, SIMILARITIES
    from sinklab.data.run_data import PREPENDED_IDS, TASKS
    from sinklab.model.attention import COMBINATIONS
    from sinklab.model.layers import FEATURE_MAPS, FFN_ACTIVATIONS, GATES, INITIALIZATIONS, NORM_PLACEMENTS
    from sinklab.model.learned_kv import LEARNED_KV_KINDS, VALUE_DIRECTIONS
    from sinklab.model.positions import POSITIONS
    from sinklab.train.optimizer import OPTIMIZERS, SCHEDULES

    assert set(get_args(spec.SimilarityName)) == set(SIMILARITIES) == set(spec.NORMALIZERS_BY_SIMILARITY)
    all_normalizers = {name for normalizers in spec.NORMALIZERS_BY_SIMILARITY.values() for name in normalizers}
    assert set(get_args(spec.NormalizerName)) == set(NORMALIZERS) == all_normalizers
    assert set(get_args(spec.BackendName)) == {'auto', *BACKENDS}
    assert list_choices(spec.AttentionConfig, 'feature_map') == set(FEATURE_MAPS)
    assert list_choices(spec.ModelConfig, 'position') == set(POSITIONS)
    assert list_choices(spec.LearnedKVConfig, 'kind') == set(LEARNED_KV_KINDS)
    assert set(spec.FFN_NAMES) == set(FFN_ACTIVATIONS)
    assert list_choices(spec.ModelConfig, 'norm') == set(NORM_PLACEMENTS)
    assert list_choices(spec.ModelConfig, 'combination') == set(COMBINATIONS)
    assert list_choices(spec.ModelConfig, 'gate') == set(GATES)
    assert list_choices(spec.ModelConfig, 'initialization') == set(INITIALIZATIONS)
    assert list_choices(spec.LearnedKVConfig, 'value') == {'learned', *VALUE_DIRECTIONS}
    assert list_choices(spec.OptimizerConfig, 'name') == set(OPTIMIZERS)
    assert list_choices(spec.OptimizerConfig, 'schedule') == set(SCHEDULES)
    assert list_choices(spec.DataConfig, 'task') == set(TASKS)
    assert list_choices(spec.ProbeConfig, 'prepend') == set(PREPENDED_IDS)


def test_shifted_similarity_excludes_mass_independent_normalizers():
    from sinklab.attn.operations import SIMILARITIES
    from sinklab.config.validate import MASS_INDEPENDENT_NORMALIZERS

    for kind, similarity in SIMILARITIES.items():
        assert not (
            similarity.is_shifted and set(MASS_INDEPENDENT_NORMALIZERS) & set(spec.NORMALIZERS_BY_SIMILARITY[kind])
        ), kind


def test_mass_independent_normalizers_do_not_use_total():
    from sinklab.attn.operations import NORMALIZERS
    from sinklab.config.validate import MASS_INDEPENDENT_NORMALIZERS

    assert set(MASS_INDEPENDENT_NORMALIZERS) == {
        name for name, normalizer in NORMALIZERS.items() if not normalizer.uses_total
    }
