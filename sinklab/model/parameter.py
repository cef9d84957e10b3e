"""Parameters with named axes, initialised as the released code does (sail-sg/Attention-Sink, model.py)."""

import jax
import jax.numpy as jnp
from flax import nnx


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...]) -> nnx.Param:
    """N(0, std^2) of `shape`, each dimension named by a logical axis of sharding.RULES."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def fan_in(inputs: int) -> float:
    """sqrt(2 / (5 fan_in)): the standard deviation of every linear map and of the embedding."""
    return (2 / (5 * inputs)) ** 0.5
