"""Tests of products with parameters and of their gradients, for each order of sizes of the factors."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sinklab
from sinklab.config.spec import Layout
from sinklab.parallel import device_mesh
from sinklab.parallel.param_einsum import sharded_einsum

MODEL_DIR = Path(sinklab.__file__).parent / 'model'
EQUATIONS = sorted(
    {
        equation
        for path in MODEL_DIR.glob('*.py')
        for equation in re.findall(r"_einsum\(\s*'([A-Z,]+->[A-Z]+)'", path.read_text(encoding='utf-8'))
    }
)
SIZES = dict(B=2, T=3, H=2, K=4, S=5)


@pytest.mark.parametrize('wide_dim', ['', 'D', 'F', 'V', 'G'])
@pytest.mark.parametrize('equation', EQUATIONS)
@pytest.mark.slow
def test_sharded_einsum_gradients_match_plain_einsum(equation, wide_dim):
    sizes = {letter: SIZES.get(letter, 24 if letter == wide_dim else 6) for letter in equation if letter.isalpha()}
    x_dims, weight_dims = equation.partition('->')[0].split(',')
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=[sizes[axis] for axis in dims]).astype('float32') for dims in (x_dims, weight_dims))
    axes = (None,) * weight.ndim
    y, pull_back = jax.vjp(lambda *factors: sharded_einsum(equation, axes, None, *factors), x, weight)
    expected, plain_pull_back = jax.vjp(lambda *factors: jnp.einsum(equation, *factors), x, weight)
    np.testing.assert_array_equal(y, expected)
    d_y = rng.normal(size=y.shape).astype('float32')
    for actual, reference in zip(pull_back(d_y), plain_pull_back(d_y), strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('equation', EQUATIONS)
def test_sharded_einsum_gradients_in_bfloat16_accumulate_in_float32(equation):
    sizes = {letter: SIZES.get(letter, 6) for letter in equation if letter.isalpha()}
    x_dims, weight_dims = equation.partition('->')[0].split(',')
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=[sizes[axis] for axis in dims]) for dims in (x_dims, weight_dims))
    x, weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.float32)
    y, pull_back = jax.vjp(
        lambda *factors: sharded_einsum(equation, (None,) * weight.ndim, None, *factors), x, weight
    )
    d_y = jnp.asarray(rng.normal(size=y.shape), jnp.bfloat16)
    _, plain_pull_back = jax.vjp(lambda weight: jnp.einsum(equation, x.astype(jnp.float32), weight), weight)
    np.testing.assert_allclose(
        jax.jit(pull_back)(d_y)[1], plain_pull_back(d_y.astype(jnp.float32))[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize('ffn_width', [96, 128])
@pytest.mark.parametrize('equation', ['BTD,DF->BTF', 'BTF,FD->BTD'])
def test_ffn_gradient_of_sharded_weight_is_exact(equation, ffn_width):
    """Use whole numbers, whose float32 sums are exact, on four devices."""
    x_dims, weight_dims, y_dims = equation.replace('->', ',').split(',')
    sizes, rng = dict(B=8, T=3, D=128, F=ffn_width), np.random.default_rng(0)
    x, weight, d_y = (
        rng.integers(-8, 9, [sizes[axis] for axis in dims]).astype('float32')
        for dims in (x_dims, weight_dims, y_dims)
    )
    axes = tuple(dict(D='embed', F='ffn')[dim] for dim in weight_dims)
    weight_spec = PartitionSpec(*('fsdp' if dim == 'D' else None for dim in weight_dims))

    def pull_back(x, weight, d_y):
        return jax.vjp(lambda weight: sharded_einsum(equation, axes, None, x, weight), weight)[1](d_y)[0]

    mesh = device_mesh.make_mesh(Layout(fsdp=4), jax.devices())
    batch_spec = PartitionSpec('fsdp')
    in_specs = batch_spec, weight_spec, batch_spec
    d_weight = jax.shard_map(pull_back, mesh=mesh, in_specs=in_specs, out_specs=weight_spec, check_vma=False)(
        x, weight, d_y
    )
    np.testing.assert_array_equal(d_weight, np.einsum(f'{x_dims},{y_dims}->{weight_dims}', x, d_y))


def test_einsum_equations_are_extracted_from_model_source():
    assert {'BTD,DHK->BTHK', 'BTF,FD->BTD', 'BTHD,DHK->BTHK', 'BTHK,KJ->BTHJ'} <= {*EQUATIONS}
