"""Similarities: score -> (weight, mass), the numerator of attention and what its normalizer sums.

`shift` is the largest visible score of the row where a similarity asks for one: exponentials are taken of
score - shift, so that they stay finite, and a literal 1 in a formula then stands as `unit` = exp(-shift).
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
