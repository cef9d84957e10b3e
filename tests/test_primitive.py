"""The two primitives of the kernels: cotangents of their statistics, races, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import attention, in_turn
from fusing import HEADS, LENGTH, MASKS, alibi, close, drawn, every, interpreted
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from sinklab.attend import dense, epilogue, tpu
from sinklab.attend import mask as masks
from sinklab.attend.bias import Bias
from sinklab.attend.primitive import NOTHING, Scores, primitive
from sinklab.model.positions import slopes

pytestmark = pytest.mark.usefixtures('small_blocks')


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_large_power_leaves_something_of_every_row():
    operation, mask, bias = attention('exp', 'p_norm', power=16.0), masks.causal(1024), Bias()
    arrays = drawn(64, length=1024)
    with interpreted():
        found = epilogue.attend(tpu, *arrays, operation, mask, 0, bias, False)[0]
    close(found, dense.attend(*arrays, operation, mask)[0], 5e-5)


def test_a_softmax_that_sees_nothing_has_a_finite_lse():
    mask = masks.static(np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32))
    with interpreted():
        output, (lse,) = primitive(tpu, Scores(0.125, 0.0, None), None, *drawn(64), mask, Bias())
    assert (output == 0).all()
    assert (lse == np.float32(NOTHING)).all()


def races(run, *arrays) -> bool:
    """Whether a simulated TPU whose two cores share the parallel axes of a grid sees a race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
            jax.block_until_ready(jax.jit(run)(*arrays))
    except Exception as error:  # newer versions raise
        pltpu.reset_tpu_interpret_mode_state()
        if 'RACE DETECTED' not in str(error):
            raise
        return True
    return interpreter.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize(
    ('weigher', 'mask'), in_turn((weigher, mask) for weigher in WEIGHERS for mask in ('causal', 'documents'))
)
def test_kernels_have_no_race(weigher, mask):
    scores, mask = Scores(0.125, 0.0, None), MASKS[mask](LENGTH)
    run = lambda *arrays: primitive(tpu, scores, WEIGHERS[weigher], *arrays, mask, Bias())[0].sum()  # noqa: E731
    assert not races(jax.grad(run, (0, 1, 2)), *drawn(64))


def test_a_race_would_be_seen():
    def kernel(given, made):
        made[...] = given[...]

    def run(array):
        return pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda n: (n, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda n: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel',)),
        )(array)

    assert races(run, jnp.ones((16, 128)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('axes', 'mask'),
    in_turn((axes, mask) for axes in ((4, 1, 1), (2, 1, 2), (1, 2, 2)) for mask in ('causal', 'documents')),
)
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
