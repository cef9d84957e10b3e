"""Similarities: score -> (weight, mass), the numerator of attention and what its normalizer sums.

A shifted similarity is given scores less m, the largest visible one of their row, so that exponentials stay finite;
the factor that this takes out of weight and mass alike cancels in their ratio. What was 1 before the shift is then
`unit` = exp(-m); where it is used, m is at least 0. Every similarity has a finite slope at 0, for hidden scores are
weighed as 0 and then dropped.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Weigh = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Similarity:
    weigh: Weigh  # (score, unit) -> (weight, mass)
    shifted: bool = False
    uses_unit: bool = False


def exp(score, unit):
    weight = jnp.exp(score)
    return weight, weight


def softpick(score, unit):
    """relu(e^s - 1) and |e^s - 1| (Zuhri et al., 2025)."""
    above = jnp.exp(score) - unit
    return jax.nn.relu(above), jnp.abs(above)


def sigmoid(score, unit):
    weight = jax.nn.sigmoid(score)
    return weight, weight


def elu1(score, unit):
    weight = elu_plus_one(score)
    return weight, weight


def elu_plus_one(x: jax.Array) -> jax.Array:
    """x + 1 above 0 and e^x below, where (e^x - 1) + 1 would lose all digits."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def relu(score, unit):
    weight = jax.nn.relu(score)
    return weight, weight


def identity(score, unit):
    return score, score


SIMILARITIES = {
    'exp': Similarity(exp, shifted=True),
    'softpick': Similarity(softpick, shifted=True, uses_unit=True),
    'sigmoid': Similarity(sigmoid),
    'elu1': Similarity(elu1),
    'relu': Similarity(relu),
    'identity': Similarity(identity),
}
