"""Masks, arrays, attention specs and a comparison of backends for the tests of attention."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from tiny_specs import OPERATIONS

from sinklab.attn import mask as masks
from sinklab.attn import reference
from sinklab.attn.backends import BACKENDS
from sinklab.attn.operations import resolve_operation
from sinklab.attn.pallas.kernel_interface import MASK_VALUE
from sinklab.attn.spec import AttentionSpec, RelativePositionBias, ScoreBias
from sinklab.config.spec import AttentionConfig

LENGTH, HEADS = 256, 2
POSITIONS = np.arange(LENGTH)[None, :, None]
STARTS = np.array([0, 70, 170])  # first positions of the documents
KERNEL_OPERATIONS = [operation for operation in OPERATIONS if operation[0] != 'softpick']
ALIBI_SLOPES = np.array([0.0, 0.002], np.float32)  # slopes of ALiBi; the first head has no bias


def make_causal_document_mask(length):
    start_T = STARTS[np.searchsorted(STARTS, np.arange(length), 'right') - 1]
    return masks.make_causal_mask(length) & masks.make_document_mask(jnp.asarray(start_T[None], jnp.int32))


MASKS = {
    'full': masks.make_full_mask,
    'causal': masks.make_causal_mask,
    'prefix': lambda length: masks.make_prefix_mask(length, 100),
    'window': lambda length: masks.make_causal_mask(length) & masks.make_window_mask(length, 50),
    'documents': make_causal_document_mask,
    'all of them': lambda length: (
        masks.make_prefix_mask(length, 40) & masks.make_window_mask(length, 150) & make_causal_document_mask(length)
    ),
    'padded': lambda length: masks.make_causal_mask(length - 150).pad(after=150),
}


def combine_masks(length, names=MASKS):
    """Combine the named masks in one batch, one mask for each sequence."""
    selected_masks = [MASKS[name](length) for name in names]
    start_BT, end_BT = (
        jnp.concatenate([getattr(mask, edge) for mask in selected_masks]) for edge in ('start_BT', 'end_BT')
    )
    return masks.Mask(start_BT, end_BT, masks.make_full_mask(length).bounds_2T)


def interpret_pallas():
    """Return a context in which Pallas kernels run in the interpreter."""
    return unittest.mock.patch.object(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))


def draw_inputs(
    width=64, columns=0, heads=HEADS, groups=HEADS, dtype=jnp.float32, value_width=None, length=LENGTH, batch=1
):
    """Draw (query, key, value). Queries and keys are positive, so that a sum of scores is far from 0."""
    rng = np.random.default_rng(0)
    query, key = (
        rng.uniform(0, 1, (batch, length + extra, n, width)) for extra, n in ((0, heads), (columns, groups))
    )
    value = rng.normal(size=(batch, length + columns, groups, value_width or width))
    return [jnp.asarray(array, dtype) for array in (query, key, value)]


def compute_alibi_bias(slope, distance):
    """Compute the bias of ALiBi at a distance."""
    return -slope[0] * distance


def make_alibi_bias(slope_H=ALIBI_SLOPES, columns=0):
    key_BS1 = np.pad(POSITIONS, ((0, 0), (columns, 0), (0, 0)))
    return ScoreBias(RelativePositionBias(compute_alibi_bias, slope_H[:, None]), POSITIONS, key_BS1)


def make_attention_spec(
    attention: AttentionConfig, mask: masks.Mask, columns: int = 0, bias: ScoreBias | None = None
) -> AttentionSpec:
    return AttentionSpec(resolve_operation(attention, 1), mask, columns, bias or ScoreBias())


def compute_reference_attention(arrays, attention, mask, columns=0):
    """Compute (output_BTHK, attention_BHTS) of (query, key, value, bias) with the reference implementation."""
    query, key, value, bias = (jnp.asarray(array, jnp.float32) for array in arrays)
    spec = make_attention_spec(attention, mask, columns)
    visible = spec.materialize_mask(key.shape[1] - columns)
    result = reference.attend_with_matrices(query, key, value, bias, visible, spec.operation, columns)
    return result.output_BTHK, result.attention_BHTS


def compare_backend(
    backend, attention, mask, arrays, bias=lambda: ScoreBias(), columns=0, bias_parameters=(), atol=5e-5
):
    """Compare a backend with the dense one in float32, and return its (output, gradients of the arrays).

    The comparison includes the statistics of each row and the gradients of the parameters of the bias.
    """
    cotangent = np.random.default_rng(1).normal(size=(*arrays[0].shape[:3], arrays[2].shape[-1])).astype(np.float32)

    def compute_loss(arrays, bias_parameters, backend):
        attention_spec = make_attention_spec(attention, mask, columns, bias(*bias_parameters))
        attention_spec = dataclasses.replace(attention_spec, needs_abs_weight_sum=True)
        output, rows, _ = BACKENDS[backend].attend(*arrays, attention_spec)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows)

    def run_backend(backend, arrays):
        with interpret_pallas():
            (_, aux), gradients = jax.jit(jax.value_and_grad(compute_loss, (0, 1), has_aux=True), static_argnums=2)(
                arrays, bias_parameters, backend
            )
        return aux, gradients

    (actual, actual_rows), (actual_d_arrays, actual_d_parameters) = run_backend(backend, arrays)
    (output, rows), (d_arrays, d_parameters) = run_backend('dense', [array.astype(jnp.float32) for array in arrays])
    assert_close(actual_rows.abs_weight_sum_BHT, rows.abs_weight_sum_BHT, 10 * atol)
    assert_close((actual, actual_d_arrays), (output, d_arrays), atol)
    assert_close(actual_d_parameters, d_parameters, 3 * atol)  # sums over all pairs
    return actual, actual_d_arrays


def assert_close(actual, expected, atol):
    """Assert that trees agree within a tolerance relative to the largest entry of each array.

    The largest entry excludes the values of queries that see no key.
    """
    for actual_array, expected_array in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        actual_array, expected_array = (
            np.float64(np.asarray(actual_array, np.float32)),
            np.float64(np.asarray(expected_array, np.float32)),
        )
        largest = np.abs(expected_array[np.abs(expected_array) < -MASK_VALUE / 2]).max(initial=1e-2)
        np.testing.assert_allclose(actual_array, expected_array, rtol=0, atol=atol * largest)
