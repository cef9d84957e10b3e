import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain, computed in float32, returned in the dtype of x."""

    def __init__(self, width: int, epsilon: float):
        self.epsilon = epsilon
        self.gain_D = nnx.Param(jnp.ones(width), axes=(None,))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = x_BTD.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon)
        return (x * self.gain_D[...]).astype(x_BTD.dtype)
