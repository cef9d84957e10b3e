"""Furniture of the tests of attention: masks, arrays, rules, and one comparison for all."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from conftest import OPERATIONS
from jax.experimental import pallas as pl

from sinklab.attn import mask as masks
from sinklab.attn import reference
from sinklab.attn.backends import BACKENDS
from sinklab.attn.operations import resolve_operation
from sinklab.attn.pallas.reductions import MASK_VALUE
from sinklab.attn.spec import AttentionSpec, RelativePositionBias, ScoreBias
from sinklab.config.spec import AttentionConfig

LENGTH, HEADS = 256, 2
PLACES = np.arange(LENGTH)[None]
STARTS = np.array([0, 70, 170])  # of documents
KERNELS = [operation for operation in OPERATIONS if operation[0] != 'softpick']
SLOPES = np.array([0.0, 0.002], np.float32)  # of ALiBi: one head has none


def documents(length):
    start_T = STARTS[np.searchsorted(STARTS, np.arange(length), 'right') - 1]
    return masks.make_causal_mask(length) & masks.make_document_mask(jnp.asarray(start_T[None], jnp.int32))


MASKS = {
    'full': masks.make_full_mask,
    'causal': masks.make_causal_mask,
    'prefix': lambda length: masks.make_prefix_mask(length, 100),
    'window': lambda length: masks.make_causal_mask(length) & masks.make_window_mask(length, 50),
    'documents': documents,
    'all of them': lambda length: (
        masks.make_prefix_mask(length, 40) & masks.make_window_mask(length, 150) & documents(length)
    ),
    'padded': lambda length: masks.make_causal_mask(length - 150).pad(after=150),
}


def every(length, names=MASKS):
    """All masks, each of another sequence."""
    made = [MASKS[name](length) for name in names]
    start_BT, end_BT = (jnp.concatenate([getattr(mask, edge) for mask in made]) for edge in ('start_BT', 'end_BT'))
    return masks.Mask(start_BT, end_BT, masks.make_full_mask(length).bounds_2T)


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


def steep(slope, distance):
    """The function of ALiBi's curve."""
    return -slope[0] * distance


def alibi(slope_H=SLOPES, columns=0):
    key_BS = np.pad(PLACES, ((0, 0), (columns, 0)))
    return ScoreBias(RelativePositionBias(steep, slope_H[:, None]), PLACES, key_BS)


def rule(
    attention: AttentionConfig, mask: masks.Mask, columns: int = 0, bias: ScoreBias | None = None
) -> AttentionSpec:
    return AttentionSpec(resolve_operation(attention), mask, columns, bias or ScoreBias())


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A bias that is what it is, and no function of positions."""

    bias_BHTS: jax.Array
    relative = None

    def materialize(self, num_learned_kv, num_keys):
        return self.bias_BHTS


def attend(arrays, attention, mask, columns=0):
    """(output_BTHK, attention_BHTS) of (query, key, value, bias), by the definition."""
    *arrays, bias = (jnp.asarray(array, jnp.float32) for array in arrays)
    found = reference.attend(*arrays, rule(attention, mask, columns, Matrix(bias)))
    return found.output_BTHK, found.attention_BHTS


def compared(backend, attention, mask, arrays, bias=lambda: ScoreBias(), columns=0, more=(), atol=5e-5):
    """(output, gradients), which are near float32's, as are statistics and gradients of what the bias is made of."""
    cotangent = np.random.default_rng(1).normal(size=(*arrays[0].shape[:3], arrays[2].shape[-1])).astype(np.float32)

    def total(arrays, more, backend):
        asked = rule(attention, mask, columns, bias(*more))
        output, rows, _ = BACKENDS[backend].attend(*arrays, asked, needs_mass=True)
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
    close((ours, our_d_arrays), (output, d_arrays), atol)
    close(our_d_more, d_more, 3 * atol)  # sums over all pairs
    return ours, our_d_arrays


def close(ours, theirs, atol):
    """Trees within a tolerance relative to the largest entry of each array, whatever sees nothing left out."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        one, other = np.float64(np.asarray(one, np.float32)), np.float64(np.asarray(other, np.float32))
        largest = np.abs(other[np.abs(other) < -MASK_VALUE / 2]).max(initial=1e-2)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol * largest)
