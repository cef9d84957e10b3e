"""Norms, and where a block has them."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import spec


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain over the last axis, computed in float32, returned in the dtype of x."""

    def __init__(self, width: int, epsilon: float):
        self.epsilon = epsilon
        self.gain_D = nnx.Param(jnp.ones(width), axes=(None,), inputs=None)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = x_BTD.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon)
        return (x * self.gain_D[...]).astype(x_BTD.dtype)


class Identity(nnx.Module):
    """Stands where a placement has no norm."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD


@dataclasses.dataclass(frozen=True)
class NormPlacement:
    before: bool = False  # of what a branch reads
    after: bool = False  # of what it gives
    joined: bool = False  # of its sum with the stream
    final: bool = True  # of the stream that the head reads


NORM_PLACEMENTS = {
    'pre': NormPlacement(before=True),
    'post': NormPlacement(joined=True, final=False),
    'sandwich': NormPlacement(before=True, after=True),
}


def make_norm(enabled: bool, model: spec.ModelConfig, width: int | None = None) -> RMSNorm | Identity:
    return RMSNorm(width or model.width, model.norm_epsilon) if enabled else Identity()


class BranchNorms(nnx.Module):
    """The norms of one branch: joined(x + after(f(before(x))))."""

    def __init__(self, model: spec.ModelConfig):
        placement = NORM_PLACEMENTS[model.norm]
        self.before, self.after = make_norm(placement.before, model), make_norm(placement.after, model)
        self.joined = make_norm(placement.joined, model)
