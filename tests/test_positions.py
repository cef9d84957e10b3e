"""Position modules compared with the formulas of their papers."""

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_spec
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from model_options import OPTIONS

from sinklab.attn.spec import ScoreBias
from sinklab.metrics.propositions import RELATIVE_POSITIONS
from sinklab.model.positions import (
    POSITIONS,
    compute_alibi_slopes,
    compute_buckets,
    rotate_halves_by_product,
    rotate_halves_by_slices,
    transpose_rotation_by_slices,
)

POSITION_IDS = np.array([[0, 1, 2, 0, 1, 5, 150], [3, 3, 4, 90, 7, 0, 1]])  # of two sequences, in any order


def make_position(kind, length=200, **changes):
    """Make a position module from its kind, heads and width."""
    return POSITIONS[kind](make_tiny_spec(**{'model__position': kind} | changes).model, length, nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['position rotary', 'rotary base', 'rotary linear', 'rotary llama3'])
@pytest.mark.parametrize('width', [2, 4, 10])
def test_rotary_matches_complex_rotation_of_dimension_pairs(width, name):
    x_BTHK = np.random.default_rng(0).normal(size=(2, 7, 3, width)).astype(np.float32)
    rotary = make_tiny_spec(**OPTIONS[name]).model.rotary
    actual = make_position('rotary', **OPTIONS[name]).rotate(x_BTHK, jnp.asarray(POSITION_IDS))
    for b, h in np.ndindex(2, 3):
        expected = formulas.rotate(np.float64(x_BTHK[b, :, h]), POSITION_IDS[b], rotary)
        np.testing.assert_allclose(actual[b, :, h], expected, atol=1e-4)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rotation_on_tpus_and_its_gradient_equal_those_on_other_devices(dtype):
    x_BTHK = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 3, 10)), dtype)
    angle_BT1J = jnp.asarray(np.random.default_rng(1).uniform(-4, 4, (2, 7, 1, 5)), jnp.float32)
    cos, sin = jnp.cos(angle_BT1J), jnp.sin(angle_BT1J)
    # Without jit, no products and sums are contracted.
    np.testing.assert_array_equal(
        rotate_halves_by_product(x_BTHK, cos, sin), rotate_halves_by_slices(x_BTHK, cos, sin)
    )
    np.testing.assert_array_equal(
        rotate_halves_by_product(x_BTHK, cos, -sin), transpose_rotation_by_slices(x_BTHK, cos, sin)
    )


@pytest.mark.slow
def test_rotary_scores_depend_only_on_distance():
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    position_ids = jnp.arange(10)[None]
    queries, keys = (make_position('rotary').rotate(jnp.tile(x, (1, 10, 1, 1)), position_ids) for x in (query, key))
    score = np.einsum('tk,sk->ts', queries[0, :, 0], keys[0, :, 0])
    for distance in range(-9, 10):
        diagonal = np.diagonal(score, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(score) > 0.1


@pytest.mark.parametrize('heads', [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_match_paper_formula(heads):
    np.testing.assert_allclose(compute_alibi_slopes(heads), formulas.compute_alibi_slopes(heads), rtol=1e-6)


def test_alibi_slopes_of_eight_heads_are_powers_of_one_half():
    np.testing.assert_array_equal(compute_alibi_slopes(8), 0.5 ** np.arange(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['none', *RELATIVE_POSITIONS, 'relative_t5', 'alibi'])
def test_relative_bias_matches_formula_of_distance(kind):
    module = make_position(kind, model__heads=6)
    table_RH = np.asarray(module.table_RH[...]) if kind == 'relative_t5' else None
    actual = ScoreBias(module.make_relative_bias(), jnp.asarray(POSITION_IDS), jnp.asarray(POSITION_IDS)).materialize(
        0, 7
    )
    for b, position_T in enumerate(POSITION_IDS):
        expected = formulas.compute_position_bias(kind, position_T, 6, table_RH)
        np.testing.assert_allclose(np.broadcast_to(actual, (2, 6, 7, 7))[b], expected, rtol=1e-6)


def test_buckets_match_t5_and_released_code():
    distances = np.arange(400)
    np.testing.assert_array_equal(
        compute_buckets(jnp.asarray(distances)), [formulas.compute_t5_bucket(d) for d in distances]
    )


def test_buckets_with_floor_first_match_printed_formula():
    distances = np.arange(400)
    actual = compute_buckets(jnp.asarray(distances), floor_first=True)
    np.testing.assert_array_equal(actual, [formulas.compute_printed_bucket(d) for d in distances])
    assert sorted(set(np.asarray(actual).tolist())) == [*range(17), 31]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=5, max_size=5))
def test_buckets_never_decrease_with_distance(distances):
    for floor_first in (False, True):
        assert (np.diff(compute_buckets(jnp.sort(jnp.asarray(distances)), floor_first)) >= 0).all()


@pytest.mark.slow
def test_sinusoids_place_all_sines_before_all_cosines():
    x_BTD = np.random.default_rng(0).normal(size=(2, 7, 16)).astype(np.float32)
    actual = make_position('absolute').embed(x_BTD, jnp.asarray(POSITION_IDS))
    for b, position_T in enumerate(POSITION_IDS):
        np.testing.assert_allclose(actual[b], x_BTD[b] + formulas.compute_sinusoids(position_T, 16), atol=1e-4)
    np.testing.assert_allclose((actual - x_BTD)[:, POSITION_IDS[0] == 0][0], [[0] * 8 + [1] * 8] * 2, atol=1e-6)


@pytest.mark.slow
def test_learned_position_adds_table_row_of_each_index():
    module = make_position('learned')
    x_BTD = jnp.ones((2, 7, 16))
    table_TD = np.asarray(module.table_TD[...])
    assert table_TD.shape == (200, 16)
    np.testing.assert_allclose(module.embed(x_BTD, jnp.asarray(POSITION_IDS)), 1 + table_TD[POSITION_IDS], rtol=1e-6)


@pytest.mark.parametrize('kind', POSITIONS)
def test_position_acts_only_on_embedding_rotation_or_bias(kind):
    module = make_position(kind)
    embeds, rotates = kind in ('absolute', 'learned'), kind == 'rotary'
    x = np.random.default_rng(0).normal(size=(2, 7, 4, 16)).astype(np.float32)
    position_ids = jnp.asarray(POSITION_IDS)
    assert np.array_equal(module.embed(x[:, :, 0], position_ids), x[:, :, 0]) is not embeds
    assert np.array_equal(module.rotate(x, position_ids), x) is not rotates
    assert (module.make_relative_bias() is None) is (embeds or rotates or kind == 'none')


@pytest.mark.parametrize('kind', POSITIONS)
def test_positions_have_only_learned_parameters(kind):
    parameter_names = {'learned': ['table_TD'], 'relative_t5': ['table_RH']}
    assert list(nnx.to_pure_dict(nnx.state(make_position(kind), nnx.Param))) == parameter_names.get(kind, [])
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(make_position(kind))))
    assert len(leaves) == len(parameter_names.get(kind, []))
