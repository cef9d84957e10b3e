"""Tests of batches that are divided over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_unpatched_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src import test_util as jtu
from jax.sharding import PartitionSpec
from tiny_specs import draw_params, make_tiny_spec

from benchmarks.hlo import HloProgram
from sinklab.config.spec import Layout
from sinklab.parallel import collectives, device_mesh, sharding
from sinklab.planning import topology
from sinklab.train import state, validation_loss


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 900), st.integers(1, 64), st.integers(1, 16))
def test_compute_part_sizes_fits_sequences_with_minimal_padding(num_sequences, max_rows_per_shard, num_shards):
    num_parts, rows = validation_loss.choose_eval_batch_sizes(
        num_sequences, max_rows_per_shard * num_shards, num_shards
    )
    assert rows % num_shards == 0
    assert rows <= max_rows_per_shard * num_shards
    assert 0 <= num_parts * rows - num_sequences < num_parts * num_shards


def test_pad_rows_appends_sequences_that_are_not_predicted():
    padded_NT = validation_loss.pad_rows(np.arange(6).reshape(3, 2), 5)
    np.testing.assert_array_equal(padded_NT[:3], np.arange(6).reshape(3, 2))
    np.testing.assert_array_equal(padded_NT[3:], np.full((2, 2), -1))


@pytest.mark.parametrize('rings', [(4,), (2, 2), (1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_reduce_scatter_over_rings_matches_full_sum(rings):
    mesh, parts = device_mesh.make_mesh(Layout(fsdp=4)), np.arange(4 * 8 * 3.0, dtype=np.float32).reshape(4, 8, 3)

    def reduce_scatter_part(part_8N):
        token = collectives.AXIS_RINGS.set(dict(fsdp=rings))
        try:
            return collectives.reduce_scatter(part_8N[0], 'embed', None)
        finally:
            collectives.AXIS_RINGS.reset(token)

    spec = PartitionSpec('fsdp')
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.shard_map(reduce_scatter_part, in_specs=spec, out_specs=spec, check_vma=False))(parts)
    np.testing.assert_array_equal(actual, parts.sum(0))


@pytest.mark.slow
@pytest.mark.skipif(topology.find_libtpu() is None, reason='libtpu, which has the compiler, could not be installed')
@pytest.mark.parametrize('chips', ['v5p:2x4x4', 'v5p:4x4x4', 'v5e:8x8', 'v5e:16x16'])
def test_compiler_of_tpus_does_not_replace_gathers_and_scatters_by_sums_of_whole_arrays(chips):
    mesh = make_unpatched_mesh(Layout(), topology.parse_topology(chips)[1])
    weight_spec, batch_spec = PartitionSpec('fsdp'), PartitionSpec('fsdp', None, None)

    def compute_gradient(weight_NK, x_1BN):
        token = collectives.AXIS_RINGS.set(device_mesh.find_rings(mesh))
        try:
            hidden_BK = x_1BN[0] @ collectives.all_gather(weight_NK, 'embed', None)
            gradient_NK = jnp.einsum('BN,BK->NK', x_1BN[0], hidden_BK, preferred_element_type=jnp.float32)
            return collectives.reduce_scatter(gradient_NK, 'embed', None)
        finally:
            collectives.AXIS_RINGS.reset(token)

    shapes = (2048, 5632), (mesh.size, 128, 2048)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (weight_spec, batch_spec), strict=True)
    ]
    with jax.set_mesh(mesh):
        function = jax.shard_map(
            compute_gradient, in_specs=(weight_spec, batch_spec), out_specs=weight_spec, check_vma=False
        )
        text = jax.jit(function).lower(*arguments).compile().as_text()
    assert {collective.kind for collective in HloProgram(text).find_collectives()} == {'all-gather', 'reduce-scatter'}


@pytest.mark.parametrize(
    ('shape', 'wraps'),
    [
        ((4, 4, 4), (True, True, True)),
        ((4, 8, 12), (True, True, True)),
        ((2, 4, 4), (False, False, False)),
        ((8, 8), (False, False, False)),
        ((8, 16), (False, True, False)),
        ((16, 16), (True, True, False)),
    ],
)
def test_wraparound_links_close_whole_cubes_and_dimensions_of_16(shape, wraps):
    assert topology.find_wraparound_links(shape) == wraps


def test_indivisible_batch_raises_instead_of_being_replicated():
    mesh = device_mesh.make_mesh(Layout(data=2, fsdp=2))
    assert sharding.make_batch_sharding(mesh, (8, 17)).shard_shape((8, 17)) == (2, 17)
    with pytest.raises(ValueError, match=r'6 sequences.*4 devices'):
        sharding.make_batch_sharding(mesh, (6, 17))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match='6 sequences'):
        jax.jit(lambda x: sharding.constrain_sharding(x, 'batch', None))(np.zeros((6, 17)))


@pytest.mark.slow
@pytest.mark.parametrize('loss', ['all', 'assistant'])
def test_indivisible_validation_compiles_once_and_returns_mean(loss):
    """Use 11 windows in batches of 8 over 4 devices. Some tokens of a chat are excluded from the loss."""
    spec = make_tiny_spec(
        optimizer__batch_size=8, **({} if loss == 'all' else dict(data__loss=loss, data__source='chat:x'))
    )
    mesh, params = device_mesh.make_mesh(Layout(data=4)), draw_params(spec)
    rng = np.random.default_rng(0)
    ids_NT = rng.integers(0, 300, (11, 17)).astype(np.int32)
    if loss == 'assistant':
        ids_NT = np.where(rng.uniform(size=ids_NT.shape) < 0.3, ~ids_NT, ids_NT)
    input_NT = np.where(ids_NT < 0, ~ids_NT, ids_NT)
    loss_NT, _ = validation_loss.make_token_loss(spec, device_mesh.make_mesh(Layout()))(params, input_NT)
    with jax.set_mesh(mesh), jtu.count_jit_compilation_cache_miss() as count_compilations:
        metrics = validation_loss.make_validation_fn(spec, Layout(data=4), mesh)(params, ids_NT)
    assert count_compilations() == 1
    expected = np.mean(np.asarray(loss_NT), where=ids_NT[:, 1:] >= 0)
    np.testing.assert_allclose(metrics['valid/loss'], expected, rtol=1e-5)


@pytest.mark.exhaustive
def test_init_state_is_bitwise_equal_at_full_optimization():
    spec = make_tiny_spec()
    program = jax.jit(lambda: state.init_state(spec)).lower()
    (quick_options,) = state.INIT_COMPILER_OPTIONS.values()
    states = [
        program.compile(compiler_options=options)()
        for options in (quick_options, {'xla_backend_optimization_level': 3})
    ]
    for quick_leaf, full_leaf in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(quick_leaf, full_leaf)
