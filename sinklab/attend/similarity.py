"""Similarities: score -> (weight, mass), the numerator of attention and what its normalizer sums.

A shifted similarity is given scores less the largest visible one of their row, so that exponentials stay finite;
the factor that this takes out of weight and mass alike cancels in their ratio.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Similarity:
    weigh: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    shifted: bool


def exp(score):
    weight = jnp.exp(score)
    return weight, weight


def sigmoid(score):
    weight = jax.nn.sigmoid(score)
    return weight, weight


SIMILARITIES = {
    'exp': Similarity(exp, shifted=True),
    'sigmoid': Similarity(sigmoid, shifted=False),
}
