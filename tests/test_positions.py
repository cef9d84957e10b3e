"""Position modules compared with the formulas of their papers."""

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_options import OPTIONS
from tiny_specs import make_tiny_spec

from sinklab.attn.spec import ScoreBias
from sinklab.model.positions import (
    POSITIONS,
    compute_alibi_slopes,
    compute_buckets,
    rotate_halves_by_product,
    rotate_halves_by_slices,
)

POSITION_IDS = np.array([[0, 1, 2, 0, 1, 5, 150], [3, 3, 4, 90, 7, 0, 1]])  # of two sequences, in any order


def make_position(kind, length=200, **changes):
    """Make a position module from its kind, heads and width."""
    return POSITIONS[kind](make_tiny_spec(**{'model__position': kind} | changes).model, length, nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['position rotary', 'rotary base', 'rotary linear', 'rotary llama3'])
def test_rotary_matches_complex_rotation_of_dimension_pairs(name):
    x_BTHK = np.random.default_rng(0).normal(size=(2, 7, 3, 10)).astype(np.float32)
    rotary = make_tiny_spec(**OPTIONS[name]).model.rotary
    actual = make_position('rotary', **OPTIONS[name]).rotate(x_BTHK, jnp.asarray(POSITION_IDS))
    for b, h in np.ndindex(2, 3):
        expected = formulas.rotate(np.float64(x_BTHK[b, :, h]), POSITION_IDS[b], rotary)
        np.testing.assert_allclose(actual[b, :, h], expected, atol=1e-4)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rotation_on_tpus_equals_that_on_other_devices(dtype):
    x_BTHK = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 3, 10)), dtype)
    angle_BT1J = jnp.asarray(np.random.default_rng(1).uniform(-4, 4, (2, 7, 1, 5)), jnp.float32)
    cos, sin = jnp.cos(angle_BT1J), jnp.sin(angle_BT1J)
    # Without jit, no products and sums are contracted.
    np.testing.assert_array_equal(
        rotate_halves_by_product(x_BTHK, cos, sin), rotate_halves_by_slices(x_BTHK, cos, sin)
    )


@pytest.mark.parametrize('heads', [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_match_paper_formula(heads):
    np.testing.assert_allclose(compute_alibi_slopes(heads), formulas.compute_alibi_slopes(heads), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['none', *formulas.RELATIVE_POSITIONS, 'relative_t5', 'alibi'])
def test_relative_bias_matches_formula_of_distance(kind):
    module = make_position(kind, model__heads=6)
    table_RH = np.asarray(module.table_RH[...]) if kind == 'relative_t5' else None
    position_BT1 = jnp.asarray(POSITION_IDS)[..., None]
    actual = ScoreBias(module.make_relative_bias(), position_BT1, position_BT1).materialize(0, 7)
    for b, position_T in enumerate(POSITION_IDS):
        expected = formulas.compute_position_bias(kind, position_T, 6, table_RH)
        np.testing.assert_allclose(np.broadcast_to(actual, (2, 6, 7, 7))[b], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ('floor_first', 'formula'), [(False, formulas.compute_t5_bucket), (True, formulas.compute_printed_bucket)]
)
def test_buckets_match_released_code_and_printed_formula(floor_first, formula):
    distances = np.arange(400)
    actual = compute_buckets(jnp.asarray(distances), floor_first=floor_first)
    np.testing.assert_array_equal(actual, [formula(d) for d in distances])


@pytest.mark.parametrize('kind', POSITIONS)
def test_positions_have_only_learned_parameters(kind):
    parameter_names = {'learned': ['table_TD'], 'relative_t5': ['table_RH']}
    assert list(nnx.to_pure_dict(nnx.state(make_position(kind), nnx.Param))) == parameter_names.get(kind, [])
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(make_position(kind))))
    assert len(leaves) == len(parameter_names.get(kind, []))
