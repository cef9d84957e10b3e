"""Tests of the block plan of GPU kernels, and of their block operations against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKS, assert_close, compute_alibi_bias
from gpu_problems import LENGTH, REDUCTIONS, make_problem, solve_with_matrices, weigh_squares
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.example_specs import make_operations
from sinklab.attn import mask
from sinklab.attn.kernel_attention import choose_reduction
from sinklab.attn.pallas import gpu
from sinklab.attn.pallas.gpu import make_block_ops
from sinklab.attn.pallas.gpu_lowering import REWRITES, make_lowerable
from sinklab.attn.pallas.kernel_interface import LOG2E, MASK_VALUE, LinearReduction, ScoreSpec, SoftmaxReduction
from sinklab.attn.spec import AttentionProblem, AttentionSpec


@st.composite
def intervals(draw):
    edge = st.lists(st.integers(0, 64), min_size=32, max_size=32)
    start, end = (np.array([draw(edge) for _ in range(2)], np.int32) for _ in range(2))
    return mask.Mask(start, end, np.stack([start.min(0), end.max(0)]))


def assert_plan_covers_mask(visible_mask, keys, size, by_key):
    """Assert that a plan visits every visible block, and that its unmasked blocks are entirely visible."""
    bound_BI4, segments = gpu.plan_inner_block_ranges(visible_mask, keys, size, by_key)
    visible_BTS = np.asarray(visible_mask.materialize(keys))
    blocks_BIJ = visible_BTS.reshape(len(visible_BTS), -1, size[0], keys // size[1], size[1]).swapaxes(2, 3)
    partly_visible, fully_visible = blocks_BIJ.any((3, 4)), blocks_BIJ.all((3, 4))
    partly_visible, fully_visible = (
        flags.swapaxes(1, 2) if by_key else flags for flags in (partly_visible, fully_visible)
    )
    for b, i in np.ndindex(*partly_visible.shape[:2]):
        bound = np.asarray(bound_BI4)[b, i]
        visited = [(j, masked) for low, high, masked in segments for j in range(bound[low], bound[high])]
        assert [j for j, _ in visited] == list(range(bound[0], bound[3]))
        assert set(np.flatnonzero(partly_visible[b, i])) <= {j for j, _ in visited}
        assert all(fully_visible[b, i, j] for j, masked in visited if not masked)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(intervals(), st.booleans())
def test_plan_segments_covers_visible_blocks_of_random_intervals(visible_mask, by_key):
    assert_plan_covers_mask(visible_mask, 64, (8, 4), by_key)


def make_hide_function(visible_mask, b, queries, keys):
    """Return the masking function of a pair of blocks, as kernels apply it."""
    visible = np.asarray(visible_mask.materialize(keys.stop))[b % len(visible_mask.start_BT), queries, keys]
    return lambda array, fill_value: jnp.where(visible, array, fill_value)


def run_forward(block_ops, visible_mask, query, key, value, parameter_HP):
    """Compute the forward pass of one sequence and head block by block, without a kernel."""
    outputs, all_rows = [], []
    bound_BI4, segments = gpu.plan_inner_block_ranges(visible_mask, len(key), (128, 64), False)
    for i, bound in enumerate(np.asarray(bound_BI4)[0]):
        queries, rows, total = slice(128 * i, 128 * i + 128), block_ops.start(128), jnp.zeros((128, value.shape[1]))
        for low, high, masked in segments:
            for j in range(bound[low], bound[high]):
                keys = slice(64 * j, 64 * j + 64)
                hide = (
                    make_hide_function(visible_mask, 0, queries, keys) if masked else lambda array, fill_value: array
                )
                distance = jnp.maximum(np.arange(len(query))[queries, None] - np.arange(len(key))[None, keys], 0)
                bias = make_lowerable(compute_alibi_bias)(list(parameter_HP), distance.astype(jnp.float32))
                weight, rescale, rows = block_ops.add(query[queries] @ key[keys].T, rows, bias, hide)
                total = (total if rescale is None else rescale[:, None] * total) + weight @ value[keys]
        output, rows = block_ops.finish(total, rows)
        outputs.append(output)
        all_rows.append(rows)
    return jnp.concatenate(outputs), [jnp.concatenate(rows) for rows in zip(*all_rows, strict=True)]


def compute_in_float64(function, *arrays):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, function(*(jnp.asarray(np.asarray(array, np.float64)) for array in arrays)))


@pytest.mark.parametrize(('name', 'mask_name'), [*zip(REDUCTIONS, ['padded', 'full', 'window'], strict=True)])
@pytest.mark.slow
def test_block_ops_forward_matches_float64_reference(name, mask_name):
    kernel_spec, arrays = make_problem(MASKS[mask_name](LENGTH))
    expected = compute_in_float64(
        functools.partial(solve_with_matrices, REDUCTIONS[name], kernel_spec), *arrays, kernel_spec.parameter_HP
    )
    query, key, value = (array.astype(jnp.float32) for array in arrays)
    block_ops = make_block_ops(REDUCTIONS[name], kernel_spec.score_spec)
    with jax.default_matmul_precision('highest'):
        actual = run_forward(
            block_ops, kernel_spec.mask, query[0, 1], key[0, 0], value[0, 0], kernel_spec.parameter_HP[1]
        )
    assert_close(actual, jax.tree.map(lambda array: array[0, 1], expected), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', REDUCTIONS)
def test_block_ops_gradients_match_float64_reference(name):
    causal_mask = mask.make_causal_mask(128)
    reduction, score_spec = REDUCTIONS[name], make_problem(causal_mask, length=128)[0].score_spec
    is_softmax, block_ops = reduction == SoftmaxReduction(), make_block_ops(reduction, score_spec)
    rng = np.random.default_rng(1)
    product, d_weight, bias = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(3))
    d_rows = [rng.standard_normal((128, 1)).astype(np.float32) for _ in range(reduction.num_statistics)]
    visible = np.asarray(causal_mask.materialize(128))[0]

    def compute_weighted_sum(product):
        score = score_spec.scale * product + bias + score_spec.offset
        weight, masses = (
            (jnp.exp(score - shift), (jnp.exp(score - shift),)) if is_softmax else reduction.weigh_and_sum(score)
        )
        masked_terms = [jnp.where(visible, term, 0) for term in (weight, *masses)]
        total = sum((d * term).sum() for d, term in zip((d_weight, *d_rows), masked_terms, strict=True))
        return total / score_spec.scale, masked_terms[0]

    shift = np.where(np.arange(128)[:, None] < 3, MASK_VALUE, 0.7).astype(np.float32) if is_softmax else None
    visible = visible & (np.arange(128)[:, None] >= 3)
    rows = [LOG2E * shift, *d_rows] if is_softmax else d_rows
    shift = None if shift is None else np.maximum(shift, 0)
    (_, weight), d_score = compute_in_float64(jax.value_and_grad(compute_weighted_sum, has_aux=True), product)

    def hide(array, fill_value):
        return jnp.where(visible, array, fill_value)

    actual, differentiate = block_ops.compute_weight_and_vjp(product, bias, lambda n: rows[n], hide)
    assert_close((actual, differentiate(d_weight)), (weight, d_score), 1e-5)


@pytest.mark.slow
def test_make_lowerable_replaces_unsupported_primitives():
    def function(x, p):
        return jnp.tanh(x) + jax.nn.sigmoid(x) + jnp.floor(3 * x) + x**p + jnp.expm1(x) + jnp.log1p(x + 3)

    x = np.linspace(-3, 3, 100, dtype=np.float32)
    jaxpr = jax.make_jaxpr(make_lowerable(function))(x, 3.0)
    assert not {equation.primitive.name for equation in jaxpr.eqns} & REWRITES.keys()
    np.testing.assert_allclose(make_lowerable(function)(x, 3.0), function(x, 3.0), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('function', [jax.nn.sigmoid, jax.nn.softplus, jnp.expm1, lambda x: x ** jnp.float32(3.0)])
def test_make_lowerable_keeps_precision_for_small_values(function):
    x = np.concatenate([np.linspace(-30, 30, 100), [1e-3, -1e-3, 1e-7, -1e-7]]).astype(np.float32)
    np.testing.assert_allclose(make_lowerable(function)(x), function(x), rtol=2e-5)


def keep(array, fill_value):
    return array


def test_block_ops_of_sigmoid_match_float64_for_small_weights():
    """A relative bound: sums of thousands of small weights count."""
    product = np.linspace(-640, 100, 2001, dtype=np.float32)[None]
    block_ops = make_block_ops(choose_reduction(make_operations()['sigmoid', 'none']), ScoreSpec(0.125, -3.0))
    expected = 1 / (1 + np.exp(3 - 0.125 * np.float64(product)))
    weight, *_ = block_ops.add(product, (), None, keep)
    np.testing.assert_allclose(weight, expected, rtol=1.5e-5)
    slope = block_ops.compute_weight_and_vjp(product, None, None, keep)[1](np.float32(1))
    is_small = product < 0
    np.testing.assert_allclose(slope[is_small], (expected - expected**2)[is_small], rtol=1.5e-5)
    np.testing.assert_allclose(slope, expected - expected**2, rtol=0, atol=2e-6)
    assert slope.min() >= 0


@pytest.mark.parametrize(
    ('dtype', 'width', 'reduction', 'reason'),
    [
        ('bfloat16', 64, SoftmaxReduction(), None),
        ('float16', 96, LinearReduction(weigh_squares), None),
        ('float32', 64, SoftmaxReduction(), 'float32'),
        ('bfloat16', 48, SoftmaxReduction(), '48'),
        ('bfloat16', 64, LinearReduction(lambda score: (jnp.cumsum(score, 1), ())), 'cumsum'),
        (
            'bfloat16',
            64,
            LinearReduction(lambda score: (jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, score), ())),
            'scan',
        ),
        ('bfloat16', 64, LinearReduction(lambda score: (score * np.arange(1.0, 3.0)[:1], ())), 'an array'),
    ],
)
def test_explain_unsupported_names_reason(dtype, width, reduction, reason):
    problem = AttentionProblem(AttentionSpec(None, mask.make_causal_mask(128)), 2, width, width, dtype)
    message = gpu.explain_unsupported(reduction, ScoreSpec(1.0, 0.0, compute_alibi_bias), problem)
    assert message is None if reason is None else reason in message
