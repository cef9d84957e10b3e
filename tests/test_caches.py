"""What is kept between calls is bounded."""

import ast
from pathlib import Path

import pytest
from conftest import tiny

from sinklab.train import state

ROOT = Path(__file__).parents[1] / 'sinklab'
UNBOUNDED = ('functools.cache', 'cache', 'functools.lru_cache(None)', 'functools.lru_cache(maxsize=None)')
# Functions of few values, whoever asks: the schemes of storage.paths.REMOTE_SCHEMES; classes of a library.
FEW = {'register_file_system', 'make_verified_class'}


@pytest.mark.slow
def test_no_function_of_values_of_a_user_keeps_all_its_results():
    found = set()
    for path in ROOT.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(by) in UNBOUNDED for by in node.decorator_list):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found |= {node.name} if arguments or node.args.vararg or node.args.kwarg else set()
    assert found - FEW == set()


def test_what_is_kept_of_specs_is_bounded():
    for one in (state.make_abstract_model, state.get_optimizer, state.get_state_shapes):
        assert one.cache_info().maxsize, f'{one.__name__} keeps all'


def test_specs_that_were_used_are_forgotten():
    """A notebook or a sweep in one process that goes through many specs does not keep them all."""
    bound = state.make_abstract_model.cache_info().maxsize
    for length in range(16, 16 + bound + 2):
        state.make_abstract_model(tiny(data__length=length))
    assert state.make_abstract_model.cache_info().currsize == bound


def test_what_is_asked_again_of_a_spec_is_not_made_again():
    spec = tiny()
    assert state.get_optimizer(spec) is state.get_optimizer(spec)
