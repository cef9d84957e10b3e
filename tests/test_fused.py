"""Attention without its matrix against its definition: outputs, gradients, row statistics, by every backend here."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPERATIONS, attention
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from sinklab.attend import blocks, chunked, columns_mass, dense, epilogue, fused, tpu
from sinklab.attend import mask as masks
from sinklab.attend.bias import Bias, Curve
from sinklab.attend.primitive import NOTHING, Scores, primitive
from sinklab.model.positions import slopes
from sinklab.record import Refusal

LENGTH, HEADS = 256, 2
PLACES = np.arange(LENGTH)[None]
STARTS = np.array([0] * 70 + [70] * 100 + [170] * 86)
KERNELS = [operation for operation in OPERATIONS if operation[0] != 'softpick']
SLOPES = np.array([0.0, 0.002], np.float32)  # of ALiBi: one head has none


def documents(length):
    return masks.causal(length) & masks.document(jnp.asarray(STARTS[None, :length]))


MASKS = {
    'full': masks.full,
    'causal': masks.causal,
    'prefix': lambda length: masks.prefix(length, 100),
    'window': lambda length: masks.causal(length) & masks.window(length, 50),
    'documents': documents,
    'all of them': lambda length: masks.prefix(length, 40) & masks.window(length, 150) & documents(length),
}
every_mask = pytest.mark.parametrize('mask', MASKS)


def every(length):
    """All masks, each of another sequence."""
    made = [mask(length) for mask in MASKS.values()]
    start_BT, end_BT = (jnp.concatenate([getattr(mask, edge) for mask in made]) for edge in ('start_BT', 'end_BT'))
    return masks.Mask(start_BT, end_BT, masks.full(length).hull_2T)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 128, so that short sequences have several."""
    monkeypatch.setattr(tpu, 'BLOCKS', (128,))
    monkeypatch.setattr(chunked, 'CHUNK', 48)


def interpreted():
    """Where kernels for TPU run as the XLA that they mean."""
    return unittest.mock.patch.object(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))


def drawn(
    width=64, columns=0, heads=HEADS, groups=HEADS, dtype=jnp.float32, value_width=None, length=LENGTH, batch=1
):
    """(query, key, value), positive so that a sum of scores is far from 0."""
    rng = np.random.default_rng(0)
    shapes = (0, heads, width), (columns, groups, width), (columns, groups, value_width or width)
    return [jnp.asarray(rng.uniform(0, 1, (batch, length + more, n, k)), dtype) for more, n, k in shapes]


def alibi(slope_H=SLOPES, columns=0):
    key_BS = np.pad(PLACES, ((0, 0), (columns, 0)))
    return Bias(Curve(lambda slope, distance: -slope[0] * distance, slope_H[:, None]), PLACES, key_BS)


def compared(backend, operation, mask, arrays, bias=lambda: Bias(), columns=0, more=(), atol=5e-5):
    """Output, statistics and gradients with respect to the arrays and what the bias is made of."""
    cotangent = np.random.default_rng(1).normal(size=(*arrays[0].shape[:3], arrays[2].shape[-1])).astype(np.float32)

    def total(arrays, more, backend):
        made = bias(*more)
        output, rows = fused.attend(backend, *arrays, operation, mask, columns, made, measured=True)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows)

    def found(backend):
        with interpreted():
            (_, aux), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=2)(
                arrays, more, backend
            )
        return aux, gradients

    ((output, rows), gradients), ((ours, our_rows), our_gradients) = found('dense'), found(backend)
    close(ours, output, atol)
    for one, other in zip(jax.tree.leaves(our_gradients), jax.tree.leaves(gradients), strict=True):
        close(one, other, atol)
    close(our_rows.mass_BHT, rows.mass_BHT, 10 * atol)
    return our_rows, rows


def close(ours, theirs, atol):
    """Within a tolerance relative to the largest entry."""
    ours, theirs = np.float64(np.asarray(ours, np.float32)), np.float64(np.asarray(theirs, np.float32))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol * max(np.abs(theirs).max(), 1e-3))


@pytest.mark.parametrize('operation', OPERATIONS, ids='-'.join)
def test_chunks_are_the_definition_under_every_mask_with_columns_and_alibi(operation):
    bias = lambda slope_H: alibi(slope_H, columns=1)  # noqa: E731
    arrays = drawn(16, columns=1, batch=len(MASKS))
    compared('chunked', attention(*operation), every(LENGTH), arrays, bias, 1, (jnp.asarray(SLOPES),), 5e-5)


PRECISIONS = {'float32': (jnp.float32, 5e-5), 'bfloat16': (jnp.bfloat16, 3e-2)}


@pytest.mark.slow
@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('width', [64, 96, 128])
@pytest.mark.parametrize('operation', KERNELS, ids='-'.join)
def test_kernels_are_the_definition_under_every_mask_with_columns_and_alibi(operation, width, precision):
    dtype, atol = PRECISIONS[precision]
    bias = lambda slope_H: alibi(slope_H, columns=1)  # noqa: E731
    arrays = drawn(width, columns=1, dtype=dtype, batch=len(MASKS))
    compared('tpu', attention(*operation), every(LENGTH), arrays, bias, 1, (jnp.asarray(SLOPES),), atol)


@every_mask
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
def test_a_mask_known_before_tracing_is_the_definition(backend, mask):
    operation = ('exp', 'plus_one') if mask in ('full', 'window', 'documents') else ('sigmoid', 'none')
    compared(backend, attention(*operation), MASKS[mask](LENGTH), drawn())


@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize('operation', [('exp', 'plus_one'), ('elu1', 'sum')], ids='-'.join)
def test_key_heads_may_serve_several_query_heads_and_values_be_wider(backend, operation):
    arrays = drawn(64, heads=4, groups=2, value_width=96)
    compared(backend, attention(*operation), masks.causal(LENGTH), arrays)


@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize('length', [1, 100, 257])
def test_a_length_that_blocks_do_not_divide_is_padded_and_cut(backend, length):
    for operation in (('exp', 'sum'), ('sigmoid', 'sum')):
        compared(backend, attention(*operation), masks.causal(length), drawn(64, length=length))


@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize(
    'operation', [('exp', 'sum'), ('exp', 'p_norm'), ('exp', 'plus_one'), ('elu1', 'sum')], ids='-'.join
)
def test_queries_that_see_nothing_get_zeros_and_finite_gradients(backend, operation):
    end_T = np.where(np.arange(LENGTH) % 3 == 1, 0, np.arange(LENGTH) + 1)
    end_T[128:] = 0
    mask, arrays = masks.static(np.zeros(LENGTH, np.int32), end_T.astype(np.int32)), drawn(64)
    compared(backend, attention(*operation), mask, arrays)
    with interpreted():
        run = lambda *arrays: fused.attend(backend, *arrays, attention(*operation), mask)[0]  # noqa: E731
        output, pull = jax.vjp(jax.jit(run), *arrays)
        gradients = pull(jnp.ones_like(output))
    assert (np.asarray(output)[:, end_T == 0] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def text_sums(weigh, arrays, mask):
    """What the primitives sum, and their statistics, by the whole matrix."""
    score_BHTS = dense.scores(*arrays[:2])
    visible_BHTS = mask.visible(arrays[1].shape[1])[:, None]
    value_BSHV = arrays[2]
    if weigh is None:
        score_BHTS = jnp.where(visible_BHTS, score_BHTS, -jnp.inf)
        weight_BHTS, sums = jax.nn.softmax(score_BHTS), (jax.nn.logsumexp(score_BHTS, -1),)
    else:
        weight_BHTS, masses = weigh(score_BHTS)
        sums = tuple(jnp.where(visible_BHTS, mass, 0.0).sum(-1) for mass in masses)
    return jnp.einsum('BHTS,BSHV->BTHV', jnp.where(visible_BHTS, weight_BHTS, 0.0), value_BSHV), sums


WEIGHERS = {
    'softmax': None,
    'no statistic': lambda score: (jnp.tanh(score), ()),
    'two statistics': lambda score: (jnp.exp(score), (score**2, jnp.cos(score))),
}


@pytest.mark.parametrize('weigher', WEIGHERS)
def test_cotangents_of_the_statistics_reach_queries_and_keys_under_every_mask(weigher):
    arrays, mask, weigh = drawn(64, batch=len(MASKS)), every(LENGTH), WEIGHERS[weigher]
    scores = Scores(64**-0.5, 0.0, None)

    def total(arrays, summed):
        output, statistics = summed(arrays)
        draw = np.random.default_rng(3)
        return sum(jnp.sum(draw.normal(size=array.shape) * array) for array in (output, *statistics))

    with interpreted():
        ours = jax.grad(total)(arrays, lambda arrays: primitive(tpu, scores, weigh, *arrays, mask, Bias()))
    theirs = jax.grad(total)(arrays, lambda arrays: text_sums(weigh, arrays, mask))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 2e-5)


def test_a_softmax_that_sees_nothing_has_a_finite_lse():
    mask = masks.static(np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32))
    with interpreted():
        output, (lse,) = primitive(tpu, Scores(0.125, 0.0, None), None, *drawn(64), mask, Bias())
    assert (output == 0).all()
    assert (lse == np.float32(NOTHING)).all()


@pytest.mark.parametrize('mask', ['causal', 'documents'])
@pytest.mark.parametrize('weigher', WEIGHERS)
def test_kernels_have_no_race(weigher, mask):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    scores, mask = Scores(0.125, 0.0, None), MASKS[mask](LENGTH)
    run = lambda *arrays: primitive(tpu, scores, WEIGHERS[weigher], *arrays, mask, Bias())[0].sum()  # noqa: E731
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        jax.block_until_ready(jax.jit(jax.grad(run, (0, 1, 2)))(*drawn(64)))
    assert not interpreter.races.races_found


@pytest.mark.parametrize('axes', [(4, 1, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize('mask', ['causal', 'documents'])
def test_kernels_under_a_mesh_give_what_they_give_without(axes, mask):
    mesh = jax.make_mesh(axes, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
    operation, mask, arrays = attention('exp', 'plus_one'), MASKS[mask](LENGTH), drawn(64, batch=4)
    slope_H = jnp.asarray(slopes(HEADS))

    def run(arrays, slope_H):
        return jnp.sum(jnp.sin(epilogue.attend(tpu, *arrays, operation, mask, 0, alibi(slope_H), False)[0]))

    with interpreted():
        alone = jax.jit(jax.value_and_grad(run, (0, 1)))(arrays, slope_H)
        with jax.set_mesh(mesh):
            shared = jax.jit(jax.value_and_grad(run, (0, 1)))(arrays, slope_H)
    for one, other in zip(jax.tree.leaves(shared), jax.tree.leaves(alone), strict=True):
        close(one, other, 2e-5)


@pytest.mark.parametrize('backend', ['dense', 'chunked', 'tpu'])
@pytest.mark.parametrize(
    'operation', [('exp', 'sum'), ('exp', 'p_norm'), ('sigmoid', 'none'), ('identity', 'clamped')], ids='-'.join
)
def test_the_mass_on_first_keys_is_that_of_the_whole_matrix_under_every_mask(backend, operation):
    operation, mask = dataclasses.replace(attention(*operation), gain=0.5), every(LENGTH)
    arrays, bias, keys = drawn(64, columns=1, batch=len(MASKS)), alibi(columns=1), 5
    with interpreted():
        _, rows = fused.attend(backend, *arrays, operation, mask, 1, bias, measured=True)
    found = columns_mass.received(*arrays[:2], rows, operation, mask, 1, bias, keys, first=2)
    matrix = bias.matrix(PLACES, 1, 0, LENGTH)
    _, attention_BHTS = dense.attend(*arrays, operation, mask, columns=1, bias_BHTS=matrix)
    attention_BHTS = np.float64(attention_BHTS)[:, :, 2:]
    mass = np.abs(attention_BHTS).sum(-1, keepdims=True)
    close(found.raw_BHS, attention_BHTS[..., : 1 + keys].sum(2), 2e-5)
    close(found.share_BHS, (np.abs(attention_BHTS) / (mass + 1e-8))[..., : 1 + keys].sum(2), 2e-5)
    close(found.mass_BH, mass[..., 0].mean(-1), 2e-5)


intervals = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=64, max_size=64)


@settings(max_examples=50, deadline=None)
@given(intervals, st.sampled_from([(8, 8), (16, 8), (8, 32), (64, 64)]), st.booleans())
def test_a_plan_visits_what_is_seen_and_masks_what_is_seen_in_part(pairs, block, transposed):
    start, end = np.array(pairs, np.int32).T
    mask = masks.static(start, end)
    visible_IJ = np.asarray(mask.visible(64))[0].reshape(64 // block[0], block[0], 64 // block[1], block[1])
    for given_mask in (mask, masks.Mask(jnp.asarray(start)[None], jnp.asarray(end)[None], mask.hull_2T)):
        plan = (blocks.by_key if transposed else blocks.by_query)(given_mask, 64, block)
        outer_N, inner_N = plan.outer_N, plan.inner_N
        assert (np.diff(outer_N) >= 0).all()
        assert set(outer_N) == set(range(64 // block[transposed]))
        query_N, key_N = (inner_N, outer_N) if transposed else (outer_N, inner_N)
        kind_IJ = np.full((64 // block[0], 64 // block[1]), blocks.HIDDEN)
        kind_IJ[query_N, key_N] = np.asarray(plan.kind_BN)[0]
        assert (visible_IJ.all((1, 3)) == (kind_IJ == blocks.INTERIOR)).all()
        assert not (visible_IJ.any((1, 3)) & (kind_IJ == blocks.HIDDEN)).any()


@pytest.mark.parametrize(
    ('wanted', 'platform', 'case', 'message'),
    [
        ('tpu', 'cpu', {}, 'it is for tpu, and the devices here are cpu'),
        ('cudnn', 'gpu', dict(attention=attention('sigmoid', 'none')), 'it knows softmax alone'),
        ('tpu', 'tpu', dict(attention=attention('softpick', 'sum')), 'softpick'),
        ('tpu', 'tpu', dict(elementwise=False), 'a learned table'),
        ('tpu', 'tpu', dict(width=512, value_width=512), 'heads wider than 256'),
        ('tpu', 'tpu', dict(length=2**20), 'does not stay on the chip'),
    ],
)
def test_a_backend_that_cannot_is_refused_with_what_can(wanted, platform, case, message):
    plain = fused.Case(attention('exp', 'sum'), 256, 2, 64, 64, 'bfloat16')
    with pytest.raises(Refusal, match=message) as refused:
        fused.choose(wanted, platform, dataclasses.replace(plain, **case))
    assert 'auto, dense, chunked' in str(refused.value)


def test_a_kernel_that_computes_something_else_is_passed_over_and_said(monkeypatch):
    case = fused.Case(attention('exp', 'sum'), 256, 2, 64, 64, 'bfloat16')
    with interpreted():
        assert fused.choose('auto', 'tpu', case) == fused.Choice('tpu')
        monkeypatch.setattr(epilogue, 'attend', doubled(epilogue.attend))
        choice = fused.choose('auto', 'tpu', case)
    assert choice.backend == 'chunked'
    assert 'wrong on these devices' in str(choice)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('operation', KERNELS, ids='-'.join)
def test_kernels_say_that_they_cover_every_operation_but_softpick(operation, platform):
    case = fused.Case(attention(*operation), 4096, 8, 128, 128, 'bfloat16', columns=1, curve=True)
    assert fused.cannot(platform, platform, case) is None


def doubled(attend):
    def twice(*given):
        output, rows = attend(*given)
        return 2 * output, rows

    return twice
