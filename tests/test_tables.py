"""Every row of every config file."""

import importlib
from pathlib import Path

import pytest

import configs
from sinklab.spec import PAIRS, parse

TABLES = [
    module
    for path in sorted(Path(configs.__file__).parent.glob('*.py'))
    if hasattr(module := importlib.import_module(f'configs.{path.stem}'), 'ROWS')
]
ROWS = [(module, row) for module in TABLES for row in module.ROWS]


@pytest.mark.parametrize(('module', 'row'), ROWS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_row_parses_and_says_where_its_numbers_are_from(module, row):
    parse(module.get_config(row).to_dict())
    assert set(module.ROWS[row]) == {'diff', 'published', 'source'}
    assert module.ROWS[row]['published']
    assert module.ROWS[row]['source']


@pytest.mark.parametrize('module', TABLES, ids=lambda module: module.__name__)
def test_the_rows_of_a_table_differ_and_only_one_is_the_baseline(module):
    specs = [parse(module.get_config(row).to_dict()) for row in module.ROWS]
    assert len(set(specs)) == len(specs)
    assert sum(not row['diff'] for row in module.ROWS.values()) <= 1


def test_the_two_arms_of_the_quickstart_differ_in_the_operation_alone():
    from configs import quickstart

    assert quickstart.ROWS['softmax']['diff'] == {}
    assert all(key.startswith('model.attention.') for key in quickstart.ROWS['sigmoid']['diff'])


def test_an_unknown_row_lists_the_rows_and_suggests_one():
    from configs import quickstart

    with pytest.raises(ValueError, match=r"no row 'sofmax'; did you mean softmax\? \(rows: softmax, sigmoid"):
        quickstart.get_config('sofmax')
    with pytest.raises(ValueError, match='no row was named'):
        quickstart.get_config()


def test_every_menu_has_its_function():
    from typing import get_args

    from sinklab import spec
    from sinklab.attend.normalizer import NORMALIZERS
    from sinklab.attend.similarity import SIMILARITIES

    assert set(get_args(spec.Similarity)) == set(SIMILARITIES) == set(PAIRS)
    assert set(get_args(spec.Normalizer)) == set(NORMALIZERS) == {name for pair in PAIRS.values() for name in pair}
