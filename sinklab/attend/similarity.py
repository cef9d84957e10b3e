"""Similarities: score -> (weight, mass), the numerator of attention and what its normalizer sums.

A shifted similarity is given scores less m, the largest visible one of their row, so that exponentials stay finite;
the factor that this takes out of weight and mass alike cancels in their ratio. What was 1 before the shift is then
`unit` = exp(-m); where it is used, m is at least 0. Every similarity has a finite slope at 0, for hidden scores are
weighed as 0 and then dropped.
"""

# The type of the functions in the table is `Formula`, which each need not repeat.
# mypy: allow-untyped-defs

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

WeighFunction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Similarity:
    """An entry of `SIMILARITIES`: the function from scores to weights.

    Attributes:
        weigh: Element-wise function (score, unit) -> (weight, mass), with a finite slope at 0. The weight is the
            numerator of attention, the mass is what the normalizer sums; most similarities return one array twice.
        shifted: Scores come less the largest one that the query sees, so that exponentials stay finite. The factor
            must cancel between weight and sum, so that such a similarity needs a normalizer that reads the sum.
        uses_unit: `weigh` reads `unit`, which is what a 1 beside e^s becomes after the shift.
        signed: Weights may be below 0.
        rounded: The same function, faster and with errors of up to 6e-8, for kernels whose weights are not divided
            by their sum.
    """

    weigh: WeighFunction
    is_shifted: bool = False
    uses_unit: bool = False
    is_signed: bool = False
    approximate_weigh: WeighFunction | None = None


def exp(score, unit):
    weight = jnp.exp(score)
    return weight, weight


def softpick(score, unit):
    """relu(e^s - 1) and |e^s - 1| (Zuhri et al., 2025)."""
    weight_with_sign = jnp.exp(score) - unit
    return jax.nn.relu(weight_with_sign), jnp.abs(weight_with_sign)


def sigmoid(score, unit):
    weight = jax.nn.sigmoid(score)
    return weight, weight


def tanh_sigmoid(score, unit):
    weight = half_tanh(score)
    return weight, weight


@jax.custom_jvp
def half_tanh(x: jax.Array) -> jax.Array:
    """The sigmoid, right to 6e-8 and not to as much of itself; its derivative costs three operations."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


@half_tanh.defjvp
def _(primals, tangents):
    weight = half_tanh(*primals)
    return weight, (weight - weight * weight) * tangents[0]


def elu1(score, unit):
    weight = elu_plus_one(score)
    return weight, weight


@jax.custom_jvp
def elu_plus_one(x: jax.Array) -> jax.Array:
    """x + 1 above 0 and e^x below, where (e^x - 1) + 1 would lose all digits; its derivative is min(itself, 1)."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@elu_plus_one.defjvp
def _(given, moved):
    weight = elu_plus_one(*given)
    return weight, jnp.minimum(weight, 1) * moved[0]


def relu(score, unit):
    weight = jax.nn.relu(score)
    return weight, weight


def identity(score, unit):
    return score, score


SIMILARITIES = {
    'exp': Similarity(exp, is_shifted=True),
    'softpick': Similarity(softpick, is_shifted=True, uses_unit=True),
    'sigmoid': Similarity(sigmoid, approximate_weigh=tanh_sigmoid),
    'elu1': Similarity(elu1),
    'relu': Similarity(relu),
    'identity': Similarity(identity, is_signed=True),
}
