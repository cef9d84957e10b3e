"""Attention from the row sums of kernels: learned keys, normalizer and gain, in differentiable jnp."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp

from sinklab.attn import reference
from sinklab.attn.mask import Mask
from sinklab.attn.operations import Operation, RowSums, raise_to_power
from sinklab.attn.pallas.kernel_interface import (
    MASK_VALUE,
    KernelSpec,
    LinearReduction,
    Reduction,
    ScoreSpec,
    SoftmaxReduction,
    run_kernels,
)
from sinklab.attn.reference import AttentionOutput
from sinklab.attn.spec import AttentionSpec

ReduceText = Callable[[KernelSpec], tuple[jax.Array, tuple[jax.Array, ...]]]


def attend(
    kernels: ModuleType, query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, spec: AttentionSpec
) -> AttentionOutput:
    """Compute attention with a platform's kernels."""
    operation, num_learned_kv, power = spec.operation, spec.num_learned_kv, spec.operation.power
    text = query_BTHK, key_BSGK[:, num_learned_kv:], value_BSGK[:, num_learned_kv:]
    column_BHTC = compute_learned_scores(query_BTHK, key_BSGK[:, :num_learned_kv], spec)

    reduction = choose_reduction(operation, spec.needs_abs_weight_sum)

    def reduce_text(kernel_spec: KernelSpec):
        return run_kernels(kernels, reduction, kernel_spec, *text)

    kernel_spec = make_kernel_spec(spec, query_BTHK.shape[-1])
    reduce = reduce_softmax if isinstance(reduction, SoftmaxReduction) else reduce_linear
    numerator, total, abs_weight_sum, shift = reduce(reduce_text, kernel_spec, operation, column_BHTC)

    unit = jnp.exp(-shift)
    weight_BHTC, mass_BHTC = operation.similarity.weigh(column_BHTC - shift, unit)
    value_BCHK = reference.repeat_kv(value_BSGK[:, :num_learned_kv], query_BTHK.shape[2])
    numerator += jnp.einsum('BHTC,BCHK->BTHK', weight_BHTC, value_BCHK.astype(jnp.float32))
    total += raise_to_power(mass_BHTC, power).sum(-1, keepdims=True)
    abs_weight_sum += jnp.abs(weight_BHTC).sum(-1, keepdims=True)

    row_sums = RowSums(total, count_visible_keys(spec.mask, key_BSGK.shape[1] - num_learned_kv), unit, power)
    z_BHT1 = operation.normalizer.compute_z(row_sums) / operation.gain
    output_BTHK = (numerator / jnp.swapaxes(z_BHT1, 1, 2)).astype(value_BSGK.dtype)
    row_stats = (
        jnp.broadcast_to(x, abs_weight_sum.shape)[..., 0] for x in (shift, z_BHT1, abs_weight_sum / jnp.abs(z_BHT1))
    )
    return AttentionOutput(output_BTHK, jax.lax.stop_gradient(reference.RowStats(*row_stats)))


def choose_reduction(operation: Operation, needs_abs_weight_sum: bool = False) -> Reduction:
    """Return the reduction of an operation: softmax if it is shifted, else linear with the sums that are needed."""
    if operation.similarity.is_shifted:
        return SoftmaxReduction()
    needs_total, similarity = operation.normalizer.uses_total, operation.similarity
    weigh = similarity.weigh if needs_total else similarity.weigh_by_tanh or similarity.weigh

    def compute_weight_and_summands(weigh, score):
        weight, mass = weigh(score, 1.0)
        options = (
            (needs_total, lambda: raise_to_power(mass, operation.power)),
            (needs_abs_weight_sum, lambda: jnp.abs(weight)),
        )
        return weight, tuple(compute() for is_needed, compute in options if is_needed)

    return LinearReduction(
        functools.partial(compute_weight_and_summands, weigh),
        similarity.weigh_by_logistic and functools.partial(compute_weight_and_summands, similarity.weigh_by_logistic),
    )


def make_kernel_spec(spec: AttentionSpec, head_width: int) -> KernelSpec:
    """Make the kernel spec for the keys of the text, without learned keys."""
    bias, scale = spec.bias, spec.operation.scale
    score_spec = ScoreSpec(head_width**-0.5 if scale is None else scale, spec.operation.offset)
    if bias.relative is None:
        return KernelSpec(score_spec, spec.mask)
    score_spec = dataclasses.replace(
        score_spec, bias_function=bias.relative.function, is_learned=bias.relative.is_learned
    )
    # `relative` needs positions; those of each head (a forget gate) are not supported
    assert bias.query_position_BTH is not None
    assert bias.key_position_BSH is not None
    return KernelSpec(
        score_spec,
        spec.mask,
        (bias.query_position_BTH[..., 0], bias.key_position_BSH[:, spec.num_learned_kv :, 0]),
        bias.relative.parameter_HP,
    )


def reduce_softmax(reduce_text: ReduceText, kernel_spec: KernelSpec, operation: Operation, column_BHTC: jax.Array):
    """Return (numerator_BTHK, total_BHT1, abs_weight_sum_BHT1, shift_BHT1) of the text, from softmax."""
    output_BTHK, (lse_BHT,) = reduce_text(kernel_spec)
    power = operation.power or 1.0
    lse = lse_BHT[..., None]
    power_lse = lse
    if operation.power is not None:
        power_spec = dataclasses.replace(kernel_spec, score_spec=kernel_spec.score_spec * power)
        _, (power_lse_BHT,) = reduce_text(power_spec)
        power_lse = power_lse_BHT[..., None]
    # With this shift the total is at most the number of learned keys + 1, for every power. It is at least 1, except
    # with a unit, whose sum with the total is at least 1.
    shift = jnp.max(jnp.concatenate([power_lse / power, column_BHTC], -1), -1, keepdims=True)
    shift = jnp.where((lse > MASK_VALUE / 2) | (column_BHTC.shape[-1] > 0), shift, 0.0)
    shift = jax.lax.stop_gradient(jnp.maximum(shift, 0.0) if operation.uses_unit else shift)
    weight_sum, total = jnp.exp(lse - shift), jnp.exp(power_lse - power * shift)
    return output_BTHK.astype(jnp.float32) * jnp.swapaxes(weight_sum, 1, 2), total, weight_sum, shift


def reduce_linear(reduce_text: ReduceText, kernel_spec: KernelSpec, operation: Operation, column_BHTC: jax.Array):
    """Return the same as `reduce_softmax` from the linear reduction; sums that are not needed are 0."""
    output_BTHK, statistics = reduce_text(kernel_spec)
    zeros_BHT1 = jnp.zeros((*column_BHTC.shape[:-1], 1))
    statistic_columns = iter([row_BHT[..., None] for row_BHT in statistics])
    total = next(statistic_columns) if operation.normalizer.uses_total else zeros_BHT1
    return output_BTHK.astype(jnp.float32), total, next(statistic_columns, zeros_BHT1), zeros_BHT1


def compute_learned_scores(query_BTHK: jax.Array, key_BCGK: jax.Array, spec: AttentionSpec) -> jax.Array:
    batch, num_queries, num_heads, _ = query_BTHK.shape
    if not spec.num_learned_kv:
        return jnp.zeros((batch, num_heads, num_queries, 0))
    score_BHTC = reference.compute_scores(query_BTHK, reference.repeat_kv(key_BCGK, num_heads), spec.operation.scale)
    return score_BHTC + spec.bias.evaluate_learned(spec.num_learned_kv) + spec.operation.offset


def count_visible_keys(mask: Mask, num_keys: int) -> jax.Array:
    """Count the keys of the text that each query sees, as BHT1."""
    num_visible_BT = jnp.minimum(mask.end_BT, num_keys) - jnp.maximum(mask.start_BT, 0)
    return jnp.maximum(num_visible_BT, 0)[:, None, :, None]
