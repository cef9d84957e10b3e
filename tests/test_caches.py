"""Bounds of in-process caches."""

import ast
from pathlib import Path

import pytest
from conftest import make_tiny_spec

from sinklab.train import state

ROOT = Path(__file__).parents[1] / 'sinklab'
UNBOUNDED_DECORATORS = ('functools.cache', 'cache', 'functools.lru_cache(None)', 'functools.lru_cache(maxsize=None)')
# Functions with few distinct arguments: classes of a library.
FUNCTIONS_OF_FEW_VALUES = {'make_verified_class'}


@pytest.mark.slow
def test_cached_functions_with_arguments_have_maxsize():
    names = set()
    for path in ROOT.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(decorator) in UNBOUNDED_DECORATORS for decorator in node.decorator_list
            ):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names |= {node.name} if arguments or node.args.vararg or node.args.kwarg else set()
    assert names - FUNCTIONS_OF_FEW_VALUES == set()


def test_spec_caches_have_maxsize():
    for function in (state.make_abstract_model, state.get_optimizer, state.get_state_shapes):
        assert function.cache_info().maxsize, f'{function.__name__} has no maxsize'


def test_spec_caches_evict_old_entries():
    """Make more models than the cache holds, as a notebook with many specs does."""
    maxsize = state.make_abstract_model.cache_info().maxsize
    for length in range(16, 16 + maxsize + 2):
        state.make_abstract_model(make_tiny_spec(data__length=length))
    assert state.make_abstract_model.cache_info().currsize == maxsize


def test_spec_caches_return_same_object_for_same_spec():
    spec = make_tiny_spec()
    assert state.get_optimizer(spec) is state.get_optimizer(spec)
