"""The rows of every config file parse, differ, and say where their numbers are from."""

from typing import get_args, get_type_hints

import pytest
from published import NUMBERS
from rows import PAPER, ROWS, name

from configs import default, emergence, optimization, quickstart
from configs.table import flat, reading, scaled, table
from sinklab import spec
from sinklab.parse import parse
from sinklab.train import step

FREED = 'data.fixed_position'  # which rows empty although it is, lest a size have filled it


@pytest.mark.parametrize('size', ['paper', 'quickstart', 'smoke'])
@pytest.mark.parametrize(('module', 'row'), ROWS, ids=name)
def test_a_row_parses_at_every_size(module, row, size):
    parse(module.get_config(row, size).to_dict())


@pytest.mark.parametrize(('module', 'row'), ROWS, ids=name)
def test_attention_is_chosen_for_every_row(module, row):
    assert step.choice(parse(module.get_config(row, 'smoke').to_dict()), spec.Hardware()).backend == 'chunked'


@pytest.mark.parametrize(('module', 'row'), ROWS, ids=name)
def test_a_row_says_where_its_numbers_are_from_or_why_there_are_none(module, row):
    about = module.ROWS[row]
    assert {'diff', 'published', 'source'} <= set(about) <= {'diff', 'published', 'source', 'note'}
    assert about['source']
    assert about['published'] or about['note']
    assert about.get('note', '-')


@pytest.mark.parametrize('module', PAPER, ids=name)
def test_the_rows_of_a_table_differ_and_only_one_is_the_baseline(module):
    specs = {parse(module.get_config(row, 'paper').to_dict()): row for row in module.ROWS}
    assert list(specs.values()) == list(module.ROWS)
    assert sum(not row['diff'] for row in module.ROWS.values()) <= 1


@pytest.mark.parametrize('module', PAPER, ids=name)
def test_a_diff_names_known_fields_and_changes_each_of_them(module):
    plain = table({'plain': dict(diff={})}, getattr(module, 'BASE', None))('plain')
    for row, about in module.ROWS.items():
        assert set(about['diff']) <= set(flat(plain))
        same = [path for path, value in about['diff'].items() if value == reading(plain, path)]
        assert set(same) <= {FREED}, row


def test_published_numbers_are_those_of_the_sources():
    found = {
        (name(module), row): about['published']
        for module in PAPER
        for row, about in module.ROWS.items()
        if about['published'] and module is not emergence
    }
    assert found == NUMBERS


def test_the_quickstart_has_rows_of_the_other_tables_at_its_own_size():
    known = [about for module in PAPER for about in module.ROWS.values()]
    for row, about in quickstart.ROWS.items():
        assert any(about is other for other in known), row
        assert quickstart.get_config(row) == quickstart.get_config(row, 'quickstart')


def test_what_is_published_of_emergence_is_in_rows_of_the_optimization():
    for row, about in emergence.ROWS.items():
        assert not about['published'] or about is optimization.ROWS[row]


def test_the_two_arms_of_the_quickstart_differ_in_the_operation_alone():
    assert quickstart.ROWS['softmax']['diff'] == {}
    for row in ('sigmoid_apple', 'sigmoid'):
        assert all(key.startswith('model.attention.') for key in quickstart.ROWS[row]['diff'])


@pytest.mark.parametrize(
    ('value', 'paper', 'here', 'expected'),
    [
        (8e-4, 4e-4, 2e-2, 4e-2),
        (0.5, 0.1, 0.5, 2.5),
        (0.0, 0.1, 0.5, 0.0),
        (40_000, 20_000, 1500, 3000),
        (10_000, 20_000, 1500, 750),
        (128, 512, 32, 8),
        (128, 512, 4, 1),
        (32, 2048, 16, 1),  # at least 1
        (16, 96, 16, 3),  # below 3 to the nearest
        (32, 96, 16, 6),  # from there to the nearest even one
        (2048, 768, 64, 170),
        (3, 1, 1, 3),
        (2, None, 1, 2),
        (2, None, None, 2),
        (0.1, None, 0.1, 0.1),
        (None, 0.95, 0.9, None),
        ('post', 'pre', 'sandwich', 'post'),
        (True, False, True, True),
        (5, 0, 4, 5),
    ],
)
def test_a_row_keeps_its_factor_at_another_size(value, paper, here, expected):
    assert scaled(value, paper, here) == pytest.approx(expected)
    assert type(scaled(value, paper, here)) is type(value)


def test_a_part_follows_what_it_is_a_part_of():
    small = {'paper': {}, 'small': {'data.length': 128, 'model.head_width': 24, 'optimizer.steps': 200}}
    rows = {
        'window': dict(diff={'model.mask.window': 512}),
        'block': dict(diff={'model.mask.block': 64}),
        'width': dict(diff={'model.columns.key_width': 32, 'optimizer.steps': 40_000}),
        'prefix': dict(diff={'model.mask.prefix': 10}),
    }
    get_config = table(rows, {'optimizer.steps': 10_000}, small)
    assert get_config('window', 'small').model.mask.window == 32
    assert get_config('block', 'small').model.mask.block == 4
    assert get_config('width', 'small').model.columns.key_width == 8
    assert get_config('width', 'small').optimizer.steps == 800
    assert get_config('prefix', 'small').model.mask.prefix == 10
    assert get_config('width').optimizer.steps == 40_000
    assert get_config('window').optimizer.steps == 10_000


def test_a_field_that_is_none_is_refused_in_a_row_and_in_a_base():
    known = dict(diff={'seed': 1})
    for get_config in (table({'a': dict(diff={'optimizer.stps': 1})}), table({'a': known}, {'optimizer.stps': 1})):
        with pytest.raises(ValueError, match=r'optimizer\.stps is no field .* did you mean optimizer\.steps'):
            get_config('a')
    with pytest.raises(ValueError, match=r"optimizer\.steps is 'many', where a value is like 20000"):
        table({'a': dict(diff={'optimizer.steps': 'many'})})('a')


def test_an_unknown_row_or_size_lists_what_there_is_and_suggests_one():
    with pytest.raises(ValueError, match=r"no row 'sofmax'; did you mean softmax\? \(rows: softmax, sigmoid"):
        quickstart.get_config('sofmax')
    with pytest.raises(ValueError, match='no row was named'):
        quickstart.get_config()
    with pytest.raises(ValueError, match=r"no size 'smok'; did you mean smoke\? \(sizes: paper, quickstart, smoke\)"):
        quickstart.get_config('softmax', 'smok')
    with pytest.raises(ValueError, match='has no rows'):
        default.get_config('softmax')


def menu(record, field):
    return set(get_args(get_type_hints(record)[field]))


def test_every_menu_has_its_function():
    from sinklab.attend.backends import BACKENDS
    from sinklab.attend.normalizer import NORMALIZERS
    from sinklab.attend.similarity import SIMILARITIES
    from sinklab.data.batches import PREPENDED, TASKS
    from sinklab.model.attention import COMBINATIONS
    from sinklab.model.columns import COLUMNS, DIRECTIONS
    from sinklab.model.feature_map import FEATURE_MAPS
    from sinklab.model.ffn import FFNS
    from sinklab.model.gate import GATES
    from sinklab.model.initialization import INITIALIZATIONS
    from sinklab.model.norm import PLACEMENTS
    from sinklab.model.positions import POSITIONS
    from sinklab.train.optimizer import OPTIMIZERS, SCHEDULES

    assert set(get_args(spec.Similarity)) == set(SIMILARITIES) == set(spec.PAIRS)
    pairs = {name for pair in spec.PAIRS.values() for name in pair}
    assert set(get_args(spec.Normalizer)) == set(NORMALIZERS) == pairs
    assert set(get_args(spec.Backend)) == {'auto', *BACKENDS}
    assert menu(spec.Attention, 'feature_map') == set(FEATURE_MAPS)
    assert menu(spec.Model, 'position') == set(POSITIONS)
    assert menu(spec.Columns, 'kind') == set(COLUMNS)
    assert menu(spec.Model, 'ffn') == set(FFNS)
    assert menu(spec.Model, 'norm') == set(PLACEMENTS)
    assert menu(spec.Model, 'combination') == set(COMBINATIONS)
    assert menu(spec.Model, 'gate') == set(GATES)
    assert menu(spec.Model, 'initialization') == set(INITIALIZATIONS)
    assert menu(spec.Columns, 'value') == {'learned', *DIRECTIONS}
    assert menu(spec.Optimizer, 'name') == set(OPTIMIZERS) == set(spec.HYPERPARAMETERS['name'])
    assert menu(spec.Optimizer, 'schedule') == set(SCHEDULES) == set(spec.HYPERPARAMETERS['schedule'])
    assert menu(spec.Data, 'task') == set(TASKS)
    assert menu(spec.Probe, 'prepend') == set(PREPENDED)


def test_a_shifted_similarity_goes_with_no_normalizer_that_would_keep_the_shift():
    from sinklab.attend.similarity import SIMILARITIES
    from sinklab.parse import UNMEASURED

    for kind, similarity in SIMILARITIES.items():
        assert not (similarity.shifted and set(UNMEASURED) & set(spec.PAIRS[kind])), kind


def test_what_does_not_look_at_mass_is_not_given_any():
    from sinklab.attend.normalizer import NORMALIZERS
    from sinklab.parse import UNMEASURED

    assert set(UNMEASURED) == {name for name, one in NORMALIZERS.items() if not one.uses_total}


@pytest.mark.slow
def test_every_value_of_a_menu_is_in_some_row():
    specs = [parse(module.get_config(row, 'paper').to_dict()) for module, row in ROWS]
    for record, part in (
        (spec.Model, 'model'),
        (spec.Columns, 'model.columns'),
        (spec.Attention, 'model.attention'),
        (spec.Optimizer, 'optimizer'),
    ):
        for field, hint in get_type_hints(record).items():
            wanted = {value for value in get_args(hint) if isinstance(value, str)}
            found = {reading_of(one, f'{part}.{field}') for one in specs}
            assert wanted <= found | UNUSED, f'{part}.{field}'


UNUSED = {'gpt2'}  # an initialization that no table of the paper has


def reading_of(record, path):
    for part in path.split('.'):
        record = getattr(record, part)
    return record
