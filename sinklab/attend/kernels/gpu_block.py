"""What GPU kernels do with the scores of one block, in plain jnp."""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from sinklab.attend.kernels.gpu_lowering import lowerable, slopes
from sinklab.attend.kernels.primitive import NOTHING, Linear, Scores, Softmax, Sums

LOG2E = math.log2(math.e)


def across(row, shape: tuple[int, int], axis: int):
    """As many of a row or a column as fill a block."""
    return lax.broadcast_in_dim(row, shape, (axis,))


class SoftmaxBlock:
    """o = sum e^(s - lse) v and lse, online, in powers of two."""

    name, functions = 'softmax', ()  # what it weighs by, of scores

    def __init__(self, sums: Softmax, scores: Scores):
        self.scores, self.scale, self.crowded = scores, scores.scale * LOG2E, scores.curve is not None

    def scaled(self, rows):
        lse, d_mass = rows
        return [LOG2E * lse, d_mass]

    def start(self, queries: int):
        """(largest, total)."""
        return jnp.full((queries,), NOTHING, jnp.float32), jnp.zeros((queries,), jnp.float32)

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        """(weight_QS, what is kept of earlier sums, rows)."""
        (largest, total), score, scale = rows, product_QS, self.scale
        if bias_QS is not None or scale <= 0:  # else the multiply-add of the exponential scales
            score, scale = self.scale * product_QS, 1.0
        if bias_QS is not None:
            score += LOG2E * bias_QS
        score = hide(score, -jnp.inf)
        larger = jnp.maximum(largest, scale * score.max(1))
        weight_QS = jnp.exp2(scale * score - across(larger, score.shape, 0))
        kept = jnp.exp2(largest - larger)
        return weight_QS, kept, (larger, kept * total + weight_QS.sum(1))

    def finish(self, sum_QV, rows):
        largest, total = rows
        sees = total > 0
        total = jnp.where(sees, total, 1.0)
        output_QV = sum_QV * across(1 / total, sum_QV.shape, 0)
        return output_QV, [jnp.where(sees, (largest + jnp.log2(total)) / LOG2E + self.scores.offset, NOTHING)]

    def gradients(self, product, bias, row: Callable, hide: Callable):
        """(weight, dS of dA); row(0) is lse in powers of two and row(1) the cotangent of the mass, of each score."""
        score = self.scale * product - (row(0) - LOG2E * self.scores.offset)
        weight = hide(jnp.exp2(score if bias is None else score + LOG2E * bias), 0.0)
        return weight, lambda d_weight: weight * (d_weight + row(1))


class LinearBlock:
    """sum w(s) v, and sum m(s) for each mass."""

    name = 'linear'

    def __init__(self, sums: Linear, scores: Scores):
        self.scores, self.weigh, self.functions, self.statistics = scores, sums.weigh, (sums.weigh,), sums.statistics
        self.crowded = self.statistics > 1 or scores.curve is not None  # the registers

    def scaled(self, rows):
        return rows

    def score(self, product, bias):
        score = product if self.scores.scale == 1 else self.scores.scale * product
        score = score if bias is None else score + bias
        return score + self.scores.offset if self.scores.offset else score

    def start(self, queries: int):
        return tuple(jnp.zeros((queries,), jnp.float32) for _ in range(self.statistics))

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        weight_QS, masses = lowerable(self.weigh)(self.score(product_QS, bias_QS))
        sums = tuple(row + hide(mass, 0.0).sum(1) for row, mass in zip(rows, masses, strict=True))
        return hide(weight_QS, 0.0), None, sums

    def finish(self, sum_QV, rows):
        return sum_QV, list(rows)

    def gradients(self, product, bias, row: Callable, hide: Callable):
        """(weight, dS of dA); row(n) is the cotangent of mass n, of each score."""
        (weight, _), (slope, of_masses) = lowerable(functools.partial(slopes, self.weigh))(self.score(product, bias))
        like_weight = [n for n, of_mass in enumerate(of_masses) if of_mass is slope]
        given = [row(n) * of_mass for n, of_mass in enumerate(of_masses) if n not in like_weight]

        def differentiate(d_weight):
            d_score = slope * sum(map(row, like_weight), d_weight)
            return hide(sum(given, d_score), 0.0)

        return hide(weight, 0.0), differentiate


BLOCKS = {Softmax: SoftmaxBlock, Linear: LinearBlock}


def block_of(sums: Sums, scores: Scores) -> SoftmaxBlock | LinearBlock:
    return BLOCKS[type(sums)](sums, scores)
