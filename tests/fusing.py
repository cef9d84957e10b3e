"""Attention without its matrix beside the definition: masks, arrays, and their comparison."""

import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from conftest import OPERATIONS
from jax.experimental import pallas as pl

from sinklab.attend import fused
from sinklab.attend import mask as masks
from sinklab.attend.bias import Bias, Curve

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


def every(length):
    """All masks, each of another sequence."""
    made = [mask(length) for mask in MASKS.values()]
    start_BT, end_BT = (jnp.concatenate([getattr(mask, edge) for mask in made]) for edge in ('start_BT', 'end_BT'))
    return masks.Mask(start_BT, end_BT, masks.full(length).hull_2T)


def interpreted():
    """Where kernels for TPU run as the XLA that they mean."""
    return unittest.mock.patch.object(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))


def drawn(
    width=64, columns=0, heads=HEADS, groups=HEADS, dtype=jnp.float32, value_width=None, length=LENGTH, batch=1
):
    """(query, key, value), of which queries and keys are positive so that a sum of scores is far from 0."""
    rng = np.random.default_rng(0)
    query, key = (rng.uniform(0, 1, (batch, length + more, n, width)) for more, n in ((0, heads), (columns, groups)))
    value = rng.normal(size=(batch, length + columns, groups, value_width or width))
    return [jnp.asarray(array, dtype) for array in (query, key, value)]


def alibi(slope_H=SLOPES, columns=0):
    key_BS = np.pad(PLACES, ((0, 0), (columns, 0)))
    return Bias(Curve(lambda slope, distance: -slope[0] * distance, slope_H[:, None]), PLACES, key_BS)


def compared(backend, operation, mask, arrays, bias=lambda: Bias(), columns=0, more=(), atol=5e-5):
    """(output, gradients), which are near float32's, as are statistics and gradients of what the bias is made of."""
    cotangent = np.random.default_rng(1).normal(size=(*arrays[0].shape[:3], arrays[2].shape[-1])).astype(np.float32)

    def total(arrays, more, backend):
        made = bias(*more)
        output, rows = fused.attend(backend, *arrays, operation, mask, columns, made, measured=True)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows)

    def found(backend, arrays):
        with interpreted():
            (_, aux), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=2)(
                arrays, more, backend
            )
        return aux, gradients

    (ours, our_rows), (our_d_arrays, our_d_more) = found(backend, arrays)
    (output, rows), (d_arrays, d_more) = found('dense', [array.astype(jnp.float32) for array in arrays])
    close(our_rows.mass_BHT, rows.mass_BHT, 10 * atol)
    for one, other in zip((ours, *our_d_arrays), (output, *d_arrays), strict=True):
        close(one, other, atol)
    for one, other in zip(our_d_more, d_more, strict=True):  # sums over all pairs
        close(one, other, 3 * atol)
    return ours, our_d_arrays


def close(ours, theirs, atol):
    """Within a tolerance relative to the largest entry."""
    ours, theirs = np.float64(np.asarray(ours, np.float32)), np.float64(np.asarray(theirs, np.float32))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol * max(np.abs(theirs).max(), 1e-2))
