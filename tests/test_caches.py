"""Bounds of in-process caches."""

from tiny_specs import make_tiny_spec

from sinklab.train import state


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
