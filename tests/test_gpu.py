"""GPU kernels: their plan, and their blocks against the definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.attend import gpu, gpu_block, mask
from sinklab.attend.gpu_block import LOG2E, Linear, Softmax
from sinklab.attend.primitive import NOTHING, Scores

LENGTH = 384


def squares(score):
    """Two masses, of which one is the weight itself."""
    weight = jnp.where(score > 0, score + 1, jnp.exp(jnp.minimum(score, 0)))
    return weight, (weight, weight**2)


WEIGHTS = {
    'softmax': None,
    'sigmoid': lambda score: (0.5 * jnp.tanh(0.5 * score) + 0.5, ()),
    'squares': squares,
}


def alibi(parameters, distance):
    return -parameters[0] * distance


def documents(length=LENGTH, seed=0):
    begins = np.random.default_rng(seed).random((2, length)) < 0.02
    return np.maximum.accumulate(np.where(begins, np.arange(length), 0), 1).astype(np.int32)


MASKS = {
    'full': lambda: mask.full(LENGTH),
    'causal': lambda: mask.causal(LENGTH),
    'window': lambda: mask.causal(LENGTH) & mask.window(LENGTH, 100),
    'prefix': lambda: mask.prefix(LENGTH, 130),
    'padded': lambda: mask.causal(LENGTH - 150).padded(after=150),
    'documents': lambda: mask.causal(LENGTH) & mask.document(jnp.asarray(documents())),
}


@st.composite
def intervals(draw):
    edge = st.lists(st.integers(0, 64), min_size=32, max_size=32)
    start, end = (np.array([draw(edge) for _ in range(2)], np.int32) for _ in range(2))
    return mask.Mask(start, end, np.stack([start.min(0), end.max(0)]))


def assert_planned(shown, keys, size, by_key):
    """Every pair that sees is walked through, and what is walked through unmasked sees entirely."""
    bound_BI4, segments = gpu.plan(shown, keys, size, by_key)
    visible_BTS = np.asarray(shown.visible(keys))
    blocks_BIJ = visible_BTS.reshape(len(visible_BTS), -1, size[0], keys // size[1], size[1]).swapaxes(2, 3)
    some, every = blocks_BIJ.any((3, 4)), blocks_BIJ.all((3, 4))
    some, every = (one.swapaxes(1, 2) if by_key else one for one in (some, every))
    for b, i in np.ndindex(*some.shape[:2]):
        bound = np.asarray(bound_BI4)[b, i]
        walked = [(j, masked) for low, high, masked in segments for j in range(bound[low], bound[high])]
        assert [j for j, _ in walked] == list(range(bound[0], bound[3]))
        assert set(np.flatnonzero(some[b, i])) <= {j for j, _ in walked}
        assert all(every[b, i, j] for j, masked in walked if not masked)
    return bound_BI4, segments


@pytest.mark.parametrize('by_key', [False, True])
@pytest.mark.parametrize('name', MASKS)
def test_what_sees_is_visited_and_what_is_not_masked_sees_all(name, by_key):
    assert_planned(MASKS[name](), LENGTH, (64, 128) if by_key else (128, 64), by_key)


@settings(deadline=None, max_examples=100)
@given(intervals(), st.booleans())
def test_any_intervals_are_planned(shown, by_key):
    assert_planned(shown, 64, (8, 4), by_key)


@pytest.mark.parametrize('by_key', [False, True])
def test_a_causal_mask_hides_within_one_block_of_a_walk(by_key):
    bound_BI4, segments = assert_planned(mask.causal(LENGTH), LENGTH, (128, 128), by_key)
    assert [masked for *_, masked in segments] == ([True, False] if by_key else [False, True])
    first, last = (0, 1) if by_key else (2, 3)
    assert (bound_BI4[..., last] - bound_BI4[..., first] == 1).all()


def problem(name, shown, width=64, length=LENGTH, curve=alibi, groups=1, seed=0):
    """(scores, weigh, arrays): query_BHTK, key_BGSK, value_BGSV, parameter_HP, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    batch, heads = len(shown.start_BT), 2
    shapes = (batch, heads, length, width), (batch, groups, length, width), (batch, groups, length, width)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    parameter_HP = jnp.asarray(rng.uniform(0.01, 0.1, (heads, int(curve is not None))), jnp.float32)
    return Scores(width**-0.5, -0.5, curve, learned=True), WEIGHTS[name], [*arrays, parameter_HP]


def dense(scores, weigh, shown, query, key, value, parameter_HP, positions=None):
    """The contract of the kernels, with matrices."""
    heads, length, keys = query.shape[1], query.shape[2], key.shape[2]
    key, value = (jnp.repeat(one, heads // one.shape[1], 1) for one in (key, value))
    query_BT, key_BS = positions or (np.arange(length)[None], np.arange(keys)[None])
    distance_BTS = jnp.maximum(query_BT[:, :, None] - key_BS[:, None, :], 0).astype(query.dtype)
    score = scores.scale * jnp.einsum('bhtk,bhsk->bhts', query, key) + scores.offset
    if scores.curve is not None:
        score += scores.curve(list(parameter_HP.T[:, None, :, None, None]), distance_BTS[:, None])
    visible = shown.visible(keys)[:, None]
    if weigh is not None:
        weight, masses = weigh(score)
        output = jnp.einsum('bhts,bhsk->bhtk', jnp.where(visible, weight, 0), value)
        return output, tuple(jnp.where(visible, mass, 0).sum(-1) for mass in masses)
    sees = visible.any(-1)
    largest = jnp.where(sees, jnp.where(visible, score, -jnp.inf).max(-1), 0)
    weight = jnp.where(visible, jnp.exp(jnp.where(visible, score, 0) - largest[..., None]), 0)
    total = jnp.where(sees, weight.sum(-1), 1)
    output = jnp.einsum('bhts,bhsk->bhtk', weight / total[..., None], value)
    return output, (jnp.where(sees, largest + jnp.log(total), NOTHING),)


def hiding(shown, b, queries, keys):
    """The predicate of a pair of blocks, as kernels apply it."""
    visible = np.asarray(shown.visible(keys.stop))[b % len(shown.start_BT), queries, keys]
    return lambda array, instead: jnp.where(visible, array, instead)


def walk(kind, shown, query, key, value, parameter_HP):
    """Forward of one sequence and head, block by block: what a kernel does, without one."""
    outputs, rows_of_all = [], []
    bound_BI4, segments = gpu.plan(shown, len(key), (128, 64), False)
    for i, bound in enumerate(np.asarray(bound_BI4)[0]):
        queries, rows, total = slice(128 * i, 128 * i + 128), kind.start(128), jnp.zeros((128, value.shape[1]))
        for low, high, masked in segments:
            for j in range(bound[low], bound[high]):
                keys = slice(64 * j, 64 * j + 64)
                hide = hiding(shown, 0, queries, keys) if masked else lambda array, instead: array
                distance = jnp.maximum(np.arange(len(query))[queries, None] - np.arange(len(key))[None, keys], 0)
                bias = gpu_block.lowerable(alibi)(list(parameter_HP), distance.astype(jnp.float32))
                weight, kept, rows = kind.add(query[queries] @ key[keys].T, rows, bias, hide)
                total = (total if kept is None else kept[:, None] * total) + weight @ value[keys]
        output, rows = kind.finish(total, rows)
        outputs.append(output)
        rows_of_all.append(rows)
    return jnp.concatenate(outputs), [jnp.concatenate(rows) for rows in zip(*rows_of_all, strict=True)]


def in_float64(function, *arrays):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, function(*(jnp.asarray(np.asarray(one, np.float64)) for one in arrays)))


def assert_near(found, expected, tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.isfinite(one).all()
        np.testing.assert_allclose(
            one, other, rtol=tolerance, atol=tolerance * np.abs(other[other > NOTHING / 2]).max()
        )


@pytest.mark.parametrize('shown', ['full', 'window', 'padded'])
@pytest.mark.parametrize('name', WEIGHTS)
@pytest.mark.slow
def test_blocks_add_up_to_the_definition(name, shown):
    scores, weigh, arrays = problem(name, MASKS[shown]())
    kind = Softmax(scores) if weigh is None else Linear(scores, weigh)
    expected = in_float64(functools.partial(dense, scores, weigh, MASKS[shown]()), *arrays)
    query, key, value, parameter_HP = (one.astype(jnp.float32) for one in arrays)
    with jax.default_matmul_precision('highest'):
        found = walk(kind, MASKS[shown](), query[0, 1], key[0, 0], value[0, 0], parameter_HP[1])
    assert_near(found, jax.tree.map(lambda one: one[0, 1], expected), 1e-5)


@pytest.mark.parametrize('name', WEIGHTS)
def test_a_block_is_differentiated_as_the_definition_is(name):
    shown = mask.causal(128)
    scores, weigh, _ = problem(name, shown, length=128)
    kind = Softmax(scores) if weigh is None else Linear(scores, weigh)
    rng = np.random.default_rng(1)
    product, d_weight, bias = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(3))
    d_rows = [rng.standard_normal((128, 1)).astype(np.float32) for _ in range(kind.statistics)]
    visible = np.asarray(shown.visible(128))[0]

    def weighed(product):
        score = scores.scale * product + bias + scores.offset
        weight, masses = (jnp.exp(score - shift), (jnp.exp(score - shift),)) if weigh is None else weigh(score)
        hidden = [jnp.where(visible, one, 0) for one in (weight, *masses)]
        total = sum((d * one).sum() for d, one in zip((d_weight, *d_rows), hidden, strict=True))
        return total / scores.scale, hidden[0]

    shift = np.where(np.arange(128)[:, None] < 3, NOTHING, 0.7).astype(np.float32) if weigh is None else None
    visible = visible & (np.arange(128)[:, None] >= 3)
    rows = [LOG2E * shift, *d_rows] if weigh is None else d_rows
    shift = None if shift is None else np.maximum(shift, 0)
    (_, weight), d_score = in_float64(jax.value_and_grad(weighed, has_aux=True), product)
    hide = lambda array, instead: jnp.where(visible, array, instead)  # noqa: E731
    found, differentiate = kind.differentiated(product, bias, lambda n: rows[n], hide)
    assert_near((found, differentiate(d_weight)), (weight, d_score), 1e-5)


@pytest.mark.slow
def test_what_kernels_do_not_know_is_said_in_other_words():
    def function(x, p):
        return jnp.tanh(x) + jax.nn.sigmoid(x) + jnp.floor(3 * x) + x**p + jnp.expm1(x) + jnp.log1p(x + 3)

    x = np.linspace(-3, 3, 100, dtype=np.float32)
    rewritten = jax.make_jaxpr(gpu_block.lowerable(function))(x, 3.0)
    assert not {equation.primitive.name for equation in rewritten.eqns} & gpu_block.REWRITTEN.keys()
    np.testing.assert_allclose(gpu_block.lowerable(function)(x, 3.0), function(x, 3.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('function', [jax.nn.sigmoid, jax.nn.softplus, jnp.expm1, lambda x: x ** jnp.float32(3.0)])
def test_small_values_keep_their_digits(function):
    x = np.concatenate([np.linspace(-30, 30, 100), [1e-3, -1e-3, 1e-7, -1e-7]]).astype(np.float32)
    np.testing.assert_allclose(gpu_block.lowerable(function)(x), function(x), rtol=2e-5)


@pytest.mark.parametrize(
    ('dtype', 'width', 'weigh', 'reason'),
    [
        ('bfloat16', 64, None, None),
        ('float16', 96, squares, None),
        ('float32', 64, None, 'no wgmma'),
        ('bfloat16', 48, None, 'heads of 48'),
        ('bfloat16', 64, lambda score: (jnp.cumsum(score, 1), ()), 'cumsum'),
        ('bfloat16', 64, lambda score: (jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, score), ()), 'scan'),
        ('bfloat16', 64, lambda score: (score * np.arange(1.0, 3.0)[:1], ()), 'an array'),
    ],
)
def test_what_is_not_covered_is_said(dtype, width, weigh, reason):
    array = jax.ShapeDtypeStruct((1, 2, 128, width), dtype)
    found = gpu.covers(Scores(1.0, 0.0, alibi), weigh, array, array, array)
    assert found is None if reason is None else reason in found
