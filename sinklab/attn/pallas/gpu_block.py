"""Softmax and linear reductions of one block of scores on the GPU, in plain jnp."""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from sinklab.attn.pallas.gpu_lowering import compute_slopes, make_lowerable
from sinklab.attn.pallas.primitive import (
    MASK_VALUE,
    LinearReduction,
    Reduction,
    ScoreSpec,
    SoftmaxReduction,
)

LOG2E = math.log2(math.e)


def broadcast_to_block(row, shape: tuple[int, int], axis: int):
    """Repeat a row or a column to fill a block."""
    return lax.broadcast_in_dim(row, shape, (axis,))


class SoftmaxBlockOps:
    """Online softmax in powers of two: o = sum e^(s - lse) v, and lse."""

    name, weigh_functions = 'softmax', ()  # no weigh functions for `find_unsupported_ops` to check

    def __init__(self, reduction: SoftmaxReduction, score_spec: ScoreSpec):
        self.score_spec, self.scale, self.is_register_bound = (
            score_spec,
            score_spec.scale * LOG2E,
            score_spec.bias_function is not None,
        )

    def scale_rows(self, rows):
        lse, d_mass = rows
        return [LOG2E * lse, d_mass]

    def start(self, num_queries: int):
        """Return the initial (largest score, total) of each query."""
        return jnp.full((num_queries,), MASK_VALUE, jnp.float32), jnp.zeros((num_queries,), jnp.float32)

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        """Return (weight_QS, factor that rescales earlier sums, new rows)."""
        (old_max, total), score, scale = rows, product_QS, self.scale
        if bias_QS is not None or scale <= 0:  # otherwise the multiply-add of the exponential applies the scale
            score, scale = self.scale * product_QS, 1.0
        if bias_QS is not None:
            score += LOG2E * bias_QS
        score = hide(score, -jnp.inf)
        new_max = jnp.maximum(old_max, scale * score.max(1))
        weight_QS = jnp.exp2(scale * score - broadcast_to_block(new_max, score.shape, 0))
        rescale = jnp.exp2(old_max - new_max)
        return weight_QS, rescale, (new_max, rescale * total + weight_QS.sum(1))

    def finish(self, sum_QV, rows):
        largest, total = rows
        sees_keys = total > 0
        total = jnp.where(sees_keys, total, 1.0)
        output_QV = sum_QV * broadcast_to_block(1 / total, sum_QV.shape, 0)
        return output_QV, [
            jnp.where(sees_keys, (largest + jnp.log2(total)) / LOG2E + self.score_spec.offset, MASK_VALUE)
        ]

    def gradients(self, product, bias, row: Callable, hide: Callable):
        """Return (weight, function dA -> dS).

        row(0) is lse in powers of two and row(1) the cotangent of the mass, both broadcast to the scores.
        """
        score = self.scale * product - (row(0) - LOG2E * self.score_spec.offset)
        weight = hide(jnp.exp2(score if bias is None else score + LOG2E * bias), 0.0)
        return weight, lambda d_weight: weight * (d_weight + row(1))


class LinearBlockOps:
    """Linear reduction: sum w(s) v, and sum m(s) for each mass m."""

    name = 'linear'

    def __init__(self, reduction: LinearReduction, score_spec: ScoreSpec):
        self.score_spec, self.weigh, self.weigh_functions, self.num_statistics = (
            score_spec,
            reduction.weigh,
            (reduction.weigh,),
            reduction.num_statistics,
        )
        # See `choose_inner_block`.
        self.is_register_bound = self.num_statistics > 1 or score_spec.bias_function is not None

    def scale_rows(self, rows):
        return rows

    def compute_score(self, product, bias):
        score = product if self.score_spec.scale == 1 else self.score_spec.scale * product
        score = score if bias is None else score + bias
        return score + self.score_spec.offset if self.score_spec.offset else score

    def start(self, num_queries: int):
        return tuple(jnp.zeros((num_queries,), jnp.float32) for _ in range(self.num_statistics))

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        weight_QS, masses = make_lowerable(self.weigh)(self.compute_score(product_QS, bias_QS))
        sums = tuple(row + hide(mass, 0.0).sum(1) for row, mass in zip(rows, masses, strict=True))
        return hide(weight_QS, 0.0), None, sums

    def finish(self, sum_QV, rows):
        return sum_QV, list(rows)

    def gradients(self, product, bias, row: Callable, hide: Callable):
        """Return (weight, function dA -> dS); row(n) is the cotangent of mass n, broadcast to the scores."""
        (weight, _), (slope, mass_slopes) = make_lowerable(functools.partial(compute_slopes, self.weigh))(
            self.compute_score(product, bias)
        )
        same_as_weight = [n for n, mass_slope in enumerate(mass_slopes) if mass_slope is slope]
        constant_terms = [row(n) * mass_slope for n, mass_slope in enumerate(mass_slopes) if n not in same_as_weight]

        def differentiate(d_weight):
            d_score = slope * sum(map(row, same_as_weight), d_weight)
            return hide(sum(constant_terms, d_score), 0.0)

        return hide(weight, 0.0), differentiate


BLOCK_OPS = {SoftmaxReduction: SoftmaxBlockOps, LinearReduction: LinearBlockOps}


def make_block_ops(reduction: Reduction, score_spec: ScoreSpec) -> SoftmaxBlockOps | LinearBlockOps:
    return BLOCK_OPS[type(reduction)](reduction, score_spec)
